"""Every draft method is known wherever it must be, and nowhere else."""

import ast
from pathlib import Path

import pytest

from drafter import methods
from secateur.settings import WEIGHTS
from workers.config import DraftConfig
from workers.models.draft_methods import METHODS, method_of, read_draft_spec
from workers.models.readers import read_spec

ROOT = Path(__file__).parents[2]
MAY_NAME = {"secateur/speculative.py", "secateur/settings.py", "workers/models/draft_methods.py", "drafter/methods.py"}


def test_the_tables_have_the_same_methods() -> None:
    assert WEIGHTS.keys() == METHODS.keys() == methods._LOADERS.keys()
    assert dict(WEIGHTS) == {name: method.weights for name, method in METHODS.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_weights_is_checked_and_read(name: str) -> None:
    method = METHODS[name]
    assert method.is_model is (method.weights != "none")
    assert (method.check is None) is (method.read_spec is None) is not method.is_model


def test_a_drafter_without_weights_has_no_description() -> None:
    draft = DraftConfig(method="ngram", model_path="")
    target = read_spec(ROOT / "secateur/bundled/target")
    assert read_draft_spec(draft, target) is None and method_of(draft) is METHODS["ngram"]


def compared_names(source: str) -> set[str]:
    """Return the methods' names with which a file compares something, in `==`, `in` or `match`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.MatchValue | ast.MatchClass):
            found |= {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and one.value in METHODS}
    return found


def test_no_other_module_asks_for_a_method_by_its_name() -> None:
    packages = ("secateur", "workers", "drafter", "verifier", "cluster")
    files = {str(path.relative_to(ROOT)): path for package in packages for path in (ROOT / package).rglob("*.py")}
    askers = {name for name, path in files.items() if compared_names(path.read_text())}
    assert askers <= MAY_NAME | {"workers/models/head_layers.py"}  # speculators' own name of a format
    assert compared_names('if draft.method in ("ngram", "mtp"): pass') == {"ngram", "mtp"}
