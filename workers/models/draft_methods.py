"""The draft methods: where the weights of each are, what it reads, and how its description is read.

No other module of `workers`, `verifier` or `cluster` depends on a method's name. `drafter.methods` loads the proposers,
and `secateur.speculative` knows what users may write. CONTRIBUTING.md lists the steps to add a method.

Importing this module imports neither torch nor transformers, so that rules which need no model files can be checked
first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from workers.config import DraftConfig, EngineConfig
from workers.models.block_format import read_block_spec
from workers.models.config_json import read_config
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.fc_head_format import read_eagle_spec, read_mtp_spec
from workers.models.head_layers import check_dflash, check_dspark, check_eagle, check_eagle3, check_mtp
from workers.models.hybrid_format import is_hybrid
from workers.models.readers import check_model, read_spec
from workers.models.specs import DraftSpec, ModelSpec, Specs


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMethod:
    """What everyone but the drafter itself must know of a method.

    weights: in a checkpoint of its own, in the target's, or none at all. reads_features: each input token comes with
    the target's hidden state of the token before it.
    """

    weights: Literal["own", "target", "none"]
    reads_features: bool = False
    check: Callable[[dict[str, Any], Path], None] | None = None
    """Raises ValueError if the config.json with the weights is of another kind. None only without weights."""
    read_spec: Callable[[str, ModelSpec], DraftSpec] | None = None
    """Reads that config.json for this target, see `read_draft_spec`. None only without weights."""

    @property
    def is_model(self) -> bool:
        """True if drafts come from a model: it gains from a device of its own, and its draft probabilities count."""
        return self.weights != "none"


def check_draft_model(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError for what `check_model` refuses, and for a hybrid."""
    check_model(raw, path)
    if is_hybrid(raw):
        raise ValueError(
            f"{path} is a hybrid, and hybrid draft models are not implemented: each node of a tree would need a "
            "recurrent state of its own; use method 'mtp' or 'ngram', or a draft model with attention alone"
        )


def _read_draft_model(path: str, target: ModelSpec) -> DraftSpec:
    check_draft_model(read_config(Path(path)), Path(path))
    return read_spec(path)


_BLOCK_HEAD = DraftMethod(weights="own", reads_features=True, check=check_dspark, read_spec=read_block_spec)

METHODS = {
    "ngram": DraftMethod(weights="none"),
    "draft_model": DraftMethod(weights="own", check=check_draft_model, read_spec=_read_draft_model),
    "eagle": DraftMethod(weights="own", reads_features=True, check=check_eagle, read_spec=read_eagle_spec),
    "mtp": DraftMethod(weights="target", reads_features=True, check=check_mtp, read_spec=read_mtp_spec),
    "eagle3": DraftMethod(weights="own", reads_features=True, check=check_eagle3, read_spec=read_eagle3_spec),
    "dspark": _BLOCK_HEAD,
    "dflash": replace(_BLOCK_HEAD, check=check_dflash),
}


def method_of(draft: DraftConfig) -> DraftMethod:
    """Return the record of a drafter's method."""
    return METHODS[draft.method]


def has_swappable_head(draft: DraftConfig | None) -> bool:
    """Return whether the drafter is a head with weights of its own, in whose place another one can be loaded."""
    return draft is not None and method_of(draft).reads_features and method_of(draft).weights == "own"


def check_kinds(target: Path, draft: DraftConfig | None) -> None:
    """Check what config.json says of a target and of its drafter, which may differ from what `draft` expects.

    Takes milliseconds, where `read_specs`, which checks the same, imports torch and transformers. Raises like that.
    """
    check_model(read_config(target), target)
    if draft is not None and (check := method_of(draft).check) is not None:
        path = Path(draft.model_path)
        check(read_config(path), path)


def read_specs(config: EngineConfig) -> Specs:
    """Read both models of an engine. Raises FileNotFoundError and ValueError like `read_spec` and `read_draft_spec`."""
    target = read_spec(config.model_path)
    return Specs(target=target, draft=read_draft_spec(config.draft, target) if config.draft else None)


def read_draft_spec(draft: DraftConfig, target: ModelSpec) -> DraftSpec | None:
    """Read the config.json of a drafter and check that it fits the target.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: it is invalid, or does not fit the target, or a tree of fixed shape is deeper than it drafts.
    """
    read = method_of(draft).read_spec
    if read is None:
        return None
    spec, depth = read(draft.model_path, target), draft.tree.longest_path
    if spec.max_depth is not None and draft.tree.paths and depth > spec.max_depth:
        raise ValueError(
            f"{draft.model_path} drafts {spec.max_depth} tokens in one pass, and the tree is {depth} deep: write a "
            f"chain or a speculative_token_tree of at most {spec.max_depth} tokens a path"
        )
    return spec
