"""Only the engine changes a request: every other part of the verifier reads it and returns values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import verifier
from tests.support.fakes import Bench, Counting, RandomLanguage
from verifier import engine
from verifier.request import Request
from workers.comm.ipc import Speculation
from workers.config import PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import SamplingSettings

OWNERS = {"engine.py", "request.py"}
FIELDS = {field.name for field in dataclasses.fields(Request)}
MUTATORS = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "count_nodes", "add"}
METHODS = {"append", "forget", "share"}


def changes_of_requests(source: str) -> list[int]:
    """Return the lines that assign to a field of a request or change it in place."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                changed = targets
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                changed = [target]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="request"), attr=attr)) if attr in METHODS:
                lines.append(node.lineno)
                continue
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in MUTATORS:
                changed = [value]
            case ast.Call(func=ast.Name(id="setattr")):
                lines.append(node.lineno)
                continue
            case _:
                continue
        for target in changed:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                inner = part.value if isinstance(part, ast.Subscript) else part
                is_own = (
                    isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
                )
                if isinstance(inner, ast.Attribute) and inner.attr in FIELDS and not is_own:
                    lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "line",
    [
        "request.num_fed = 3",
        "request.pages, x = a, b",
        "request.num_fed += 1",
        "del request.tokens[0]",
        "r.tokens[0] = 1",
        "r.pages.extend(more)",
        "request.append([1])",
        "request.forget()",
        "setattr(request, 'num_fed', 1)",
    ],
)
def test_a_change_of_a_request_is_found_in_source(line):
    assert changes_of_requests(line) == [1]


def test_no_other_module_has_code_that_changes_a_request():
    root = Path(verifier.__file__).parent
    modules = {path for path in root.rglob("*.py") if path.name not in OWNERS}
    assert len(modules) > 15
    # A record that the prefix cache keeps for itself has a field `num_fed` neither; see FIELDS.
    found = {str(path.relative_to(root)): lines for path in modules if (lines := changes_of_requests(path.read_text()))}
    assert found == {}


def watched(owner: Any, name: str, requests: list[Request], seen: set[str]) -> None:
    """Make owner.name fail if it changes a request."""
    call = getattr(owner, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        before = [state_of(request) for request in requests]
        result = call(*args, **kwargs)
        assert [state_of(request) for request in requests] == before, f"{name} changed a request"
        seen.add(name)
        return result

    setattr(owner, name, checked)


def state_of(request: Request) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(request) if not field.name.startswith("_")]
    return {name: deepcopy(getattr(request, name)) for name in names}


@pytest.mark.parametrize(
    "language",
    [Counting(8), pytest.param(RandomLanguage(vocab=8, error=0.3), marks=pytest.mark.slow)],
    ids=["repeats", "random"],
)
def test_no_collaborator_of_the_engine_changes_a_request_while_it_serves(language, monkeypatch):
    """Requests join with shared prefixes, are drafted for, get lookup drafts, are preempted, aborted and finished."""
    costs = SimulatedCosts(step_ms=10, row_ms=0.01, draft_ms=1.0)
    tree = TreeConfig(
        kind="dynamic", num_speculative_tokens=3, max_depth=2, prune=PruneConfig(auto=True, simulated_costs=costs)
    )
    requests: list[Request] = []
    seen: set[str] = set()
    make = engine.request_of

    def made(*args: Any) -> Request:
        requests.append(make(*args))
        return requests[-1]

    monkeypatch.setattr(engine, "request_of", made)
    monkeypatch.setattr(engine, "schedule", engine.schedule)
    monkeypatch.setattr(engine, "rejection_reason", engine.rejection_reason)
    rng = np.random.default_rng(0)
    with Bench(language, "eagle3", tree, 40, max_num_seqs=6, max_num_batched_tokens=24) as b:
        own = b.engine
        for part in (own._prefix_cache, own._hidden_states, own._controller, own._inputs, own._target):
            for name, _ in inspect.getmembers(type(part), inspect.isfunction):
                if not name.startswith("_"):
                    watched(part, name, requests, seen)
        own._hidden_states._keep_page_ends = own._prefix_cache.keep_states
        for name in ("schedule", "rejection_reason"):
            watched(engine, name, requests, seen)
        for number in range(10):
            prompt = [n % 8 for n in range(int(rng.integers(8, 60)))]
            id = b.submit(
                prompt, int(rng.integers(2, 40)), SamplingSettings(temperature=0.0), ignore_eos=True,
                speculation=Speculation(auto=number % 3 > 0),
            )  # fmt: skip
            b.step()
            if number == 5:
                b.abort(id)
        b.run()
        stats = own._stats
    assert stats.prefix_cache_hits and stats.num_preemptions and stats.num_accepted_tokens
    assert {
        "schedule",
        "find",
        "share",
        "publish",
        "keep_states",
        "add",
        "take",
        "plan",
        "observe",
        "target_step",
    } <= seen
