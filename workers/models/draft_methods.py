"""The draft methods: where the weights of each are, what it reads, and how its description is read.

    METHODS                                          the records, by name
    method_of(draft) -> DraftMethod                  a drafter's record
    read_draft_spec(draft, target) -> DraftSpec      None for a drafter without weights
    read_specs(config) -> Specs                      both models of an engine
    check_kinds(target, draft) -> None               ValueError for models of the wrong kinds, without slow imports

No other module of `workers`, `verifier` or `cluster` depends on a method's name. `drafter.methods` loads the proposers,
and `secateur.speculative` knows what users may write. CONTRIBUTING.md lists the steps to add a method.

Importing this module imports neither torch nor transformers, so that rules which need no model files can be checked
first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workers.config import DraftConfig, EngineConfig
from workers.models.head_layers import check_dflash, check_dspark, check_eagle, check_eagle3, check_mtp
from workers.models.readers import check_model, read_raw, read_spec
from workers.models.specs import BlockSpec, DraftSpec, Eagle3Spec, ModelSpec, Specs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMethod:
    """What everyone but the drafter itself must know of a method.

    weights: in a checkpoint of its own, in the target's, or none at all. reads_features: each input token comes with
    the target's hidden state of the token before it. has_graphs: on GPUs its passes are CUDA graphs.
    """

    weights: Literal["own", "target", "none"]
    reads_features: bool = False
    has_graphs: bool = True
    check: Callable[[dict[str, Any], Path], None] | None = None
    """Raises ValueError if the config.json with the weights is of another kind. None only without weights."""
    read_spec: Callable[[str, ModelSpec], DraftSpec] | None = None
    """Reads that config.json for this target, see `read_draft_spec`. None only without weights."""
    load_fusion: Callable[[str, Any, torch.device, torch.dtype], Callable[[Tensor], Tensor]] | None = None
    """Loads what the verifier computes of the states at `spec.tap_layers` [N, taps * D], the features [N, H]. None =
    the features are the target's last hidden states as they are."""

    @property
    def is_model(self) -> bool:
        """True if drafts come from a model: it gains from a device of its own, and its draft probabilities count."""
        return self.weights != "none"


def _read_draft_model(path: str, target: ModelSpec) -> DraftSpec:
    spec = read_spec(path)
    if spec.vocab_size != target.vocab_size:
        raise ValueError(
            "the target and the draft model should have the same vocabulary size "
            f"(got {target.vocab_size} and {spec.vocab_size}); use a draft model of the target's family"
        )
    return spec


# The formats are imported late, because torch takes seconds to import.


def _read_eagle(path: str, target: ModelSpec) -> DraftSpec:
    from workers.models.fc_head_format import read_eagle_spec

    return read_eagle_spec(path, target)


def _read_mtp(path: str, target: ModelSpec) -> DraftSpec:
    from workers.models.fc_head_format import read_mtp_spec

    return read_mtp_spec(path, target)


def _read_eagle3(path: str, target: ModelSpec) -> DraftSpec:
    from workers.models.eagle3_format import read_eagle3_spec

    return read_eagle3_spec(path, target)


def _load_eagle3_fusion(
    path: str, spec: Eagle3Spec, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    from workers.models.eagle3_format import FeatureFusion

    return FeatureFusion.load(path, spec, device, dtype)


def _read_block(path: str, target: ModelSpec) -> DraftSpec:
    from workers.models.block_format import read_block_spec

    return read_block_spec(path, target)


def _load_context_fusion(
    path: str, spec: BlockSpec, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    from workers.models.block_format import ContextFusion

    return ContextFusion.load(path, spec, device, dtype)


_BLOCK_HEAD = DraftMethod(
    weights="own",
    reads_features=True,
    has_graphs=False,
    check=check_dspark,
    read_spec=_read_block,
    load_fusion=_load_context_fusion,
)

METHODS = {
    "ngram": DraftMethod(weights="none"),
    "draft_model": DraftMethod(weights="own", check=check_model, read_spec=_read_draft_model),
    "eagle": DraftMethod(weights="own", reads_features=True, check=check_eagle, read_spec=_read_eagle),
    "mtp": DraftMethod(weights="target", reads_features=True, check=check_mtp, read_spec=_read_mtp),
    "eagle3": DraftMethod(
        weights="own",
        reads_features=True,
        check=check_eagle3,
        read_spec=_read_eagle3,
        load_fusion=_load_eagle3_fusion,
    ),
    "dspark": _BLOCK_HEAD,
    "dflash": replace(_BLOCK_HEAD, check=check_dflash),
}


def method_of(draft: DraftConfig) -> DraftMethod:
    """Return the record of a drafter's method."""
    return METHODS[draft.method]


def check_kinds(target: Path, draft: DraftConfig | None) -> None:
    """Check what config.json says of a target and of its drafter, which may differ from what `draft` expects.

    Takes milliseconds, where `read_specs`, which checks the same, imports torch and transformers. Raises like that.
    """
    check_model(read_raw(target), target)
    if draft is not None and (check := method_of(draft).check) is not None:
        path = Path(draft.model_path)
        check(read_raw(path), path)


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
