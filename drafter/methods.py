"""Loads the proposer of each draft method: a rank's share of the weights, its KV pool and its graphs.

    load_proposer(world, specs, kernels) -> Proposer

`workers.models.draft_methods` has what others must know of the methods, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from drafter.proposers.base import (
    DraftModelProposer,
    FeatureProposer,
    Proposer,
    decoder_tree_graphs,
    head_graphs,
    head_tree_graphs,
    shared_vocabulary,
)
from drafter.proposers.block import BlockHead
from drafter.proposers.eagle import FcHead
from drafter.proposers.eagle3 import Eagle3Head, PEagleHead
from drafter.proposers.feature_head import DraftHead, FeatureHead
from drafter.proposers.ngram import MatchLengths, NgramProposer
from drafter.proposers.one_pass import OnePassHead, OnePassProposer, ScratchPages, block_growth, block_tree_graphs
from drafter.tree.block_growth import BlockGrowth
from drafter.tree.tree_graphs import BlockTreeGraphs
from drafter.workspace import draft_workspace, pass_depth
from workers.comm.groups import World
from workers.config import DraftConfig
from workers.cuda_graphs import can_capture, decoder_graphs
from workers.kernels.select import Kernels
from workers.kv_cache import kv_dtype
from workers.kv_sizing import agree_on_pages
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.specs import BlockSpec, DraftSpec, Eagle3Spec, FcHeadSpec, Specs


def load_proposer(world: World, specs: Specs, kernels: Kernels) -> Proposer:
    """Load this rank's proposer, with a KV pool of the number of pages that all ranks agree on."""
    draft = world.config.draft
    assert draft is not None
    return _LOADERS[draft.method](world, draft, specs, kernels)


def _load_ngram(world: World, draft: DraftConfig, specs: Specs, kernels: Kernels) -> Proposer:
    num_pages = agree_on_pages(world, NgramProposer.BYTES_PER_SLOT)
    lengths = MatchLengths(draft.prompt_lookup_min, draft.prompt_lookup_max)
    return NgramProposer(lengths, specs.target.vocab_size, num_pages, world.config.page_size)


def _load_model(world: World, draft: DraftConfig, specs: Specs, kernels: Kernels) -> Proposer:
    config, spec = world.config, specs.draft
    assert spec is not None
    kv_type = kv_dtype(config, kernels, world.device)
    model = load_decoder(
        draft.model_path,
        spec.layers,
        _runtime(world, kernels),
        max_model_len=config.max_model_len,
    )
    slot_bytes = model.bytes_per_slot(kv_type)
    kv = model.new_kv_pool(_num_slots(world, specs, slot_bytes), kv_type)
    vocab = shared_vocabulary(model, specs.target.vocab_size)
    graphs = tree_graphs = None
    if _has_graphs(world, kernels) and model.can_be_captured:
        graphs = decoder_graphs(model, kv, config)
        tree_graphs = decoder_tree_graphs(model, vocab, kv, config) if _has_tree_graphs(world, kernels) else None
    return DraftModelProposer(model, vocab, kv, config.page_size, graphs, tree_graphs)


def head_class(spec: DraftSpec) -> type[DraftHead]:
    """Return the class of a head that reads the target's features."""
    match spec:
        case Eagle3Spec():
            return Eagle3Head if spec.mask_token_id is None else PEagleHead
        case FcHeadSpec():
            return FcHead
        case BlockSpec():
            return BlockHead
    raise TypeError(f"{type(spec).__name__} describes no head")


def load_another_head(world: World, specs: Specs, kernels: Kernels, path: str) -> DraftHead:
    """Load this rank's share of a head of the serving one's shape. Raises ValueError, OSError."""
    assert specs.draft is not None
    return head_class(specs.draft).load(specs.draft, path, world.config.model_path, _runtime(world, kernels))


def _load_head(kind: type[FeatureHead]) -> Callable[[World, DraftConfig, Specs, Kernels], Proposer]:
    """Return the loader of heads of this class, which read the target's features."""

    def load(world: World, draft: DraftConfig, specs: Specs, kernels: Kernels) -> Proposer:
        config = world.config
        kv_type = kv_dtype(config, kernels, world.device)
        head = kind.load(specs.draft, draft.model_path, config.model_path, _runtime(world, kernels))
        kv = head.new_kv_pool(_num_slots(world, specs, head.bytes_per_slot(kv_type)), kv_type)
        is_captured = head.can_be_captured
        graphs = head_graphs(head, kv, config) if is_captured and _has_graphs(world, kernels) else None
        tree_graphs = head_tree_graphs(head, kv, config) if is_captured and _has_tree_graphs(world, kernels) else None
        return FeatureProposer(head, kv, config.page_size, config.tree_rows, graphs, tree_graphs)

    return load


def _load_eagle3(world: World, draft: DraftConfig, specs: Specs, kernels: Kernels) -> Proposer:
    spec = specs.draft
    assert isinstance(spec, Eagle3Spec)
    if spec.mask_token_id is None:
        return _load_head(Eagle3Head)(world, draft, specs, kernels)
    head = PEagleHead.load(spec, draft.model_path, world.config.model_path, _runtime(world, kernels))
    head.set_depth(pass_depth(spec, draft.tree))
    return _one_pass_proposer(head, world, specs, kernels)


def _load_block(world: World, draft: DraftConfig, specs: Specs, kernels: Kernels) -> Proposer:
    head = BlockHead.load(specs.draft, draft.model_path, world.config.model_path, _runtime(world, kernels))
    return _one_pass_proposer(head, world, specs, kernels)


def _one_pass_proposer(head: OnePassHead, world: World, specs: Specs, kernels: Kernels) -> Proposer:
    config, kv_type = world.config, kv_dtype(world.config, kernels, world.device)
    num_slots = _num_slots(world, specs, head.bytes_per_slot(kv_type))
    scratch = ScratchPages(num_slots // config.page_size, config.page_size, head.num_behind)
    num_scratch = config.max_num_seqs * scratch.per_request * config.page_size
    kv = head.new_kv_pool(num_slots + num_scratch, kv_type)
    graphs = head_graphs(head, kv, config, scratch.per_request) if _has_graphs(world, kernels) else None
    assert specs.draft is not None and config.draft is not None
    leaves = specs.draft.has_marginals
    trees: BlockTreeGraphs | BlockGrowth | None = None
    if _has_tree_graphs(world, kernels):
        trees = block_tree_graphs(head, config, has_leaf_siblings=leaves)
    elif world.device.type == "cpu" and world.tp.size == 1 and head.is_bilinear:
        trees = block_growth(head, config.draft.tree, has_leaf_siblings=leaves)
    return OnePassProposer(head, kv, config.page_size, scratch, graphs, trees)


_LOADERS: dict[str, Callable[[World, DraftConfig, Specs, Kernels], Proposer]] = {
    "ngram": _load_ngram,
    "draft_model": _load_model,
    "eagle": _load_head(FcHead),
    "mtp": _load_head(FcHead),
    "eagle3": _load_eagle3,
    "dspark": _load_block,
    "dflash": _load_block,
}


def _runtime(world: World, kernels: Kernels) -> Runtime:
    return Runtime(tp=world.tp, device=world.device, dtype=getattr(torch, world.config.dtype), kernels=kernels)


def _has_graphs(world: World, kernels: Kernels) -> bool:
    return can_capture(kernels, world.device, world.config.enforce_eager)


def _has_tree_graphs(world: World, kernels: Kernels) -> bool:
    """Tell whether whole trees are grown in graphs; with tensor parallelism these would capture collectives."""
    return _has_graphs(world, kernels) and world.tp.size == 1


def _num_slots(world: World, specs: Specs, slot_bytes: int) -> int:
    """Return the size of this rank's pool: the pages that all ranks agree on."""
    workspace = draft_workspace(world.config, specs.draft).total
    return agree_on_pages(world, slot_bytes, bytes_beside=workspace) * world.config.page_size
