"""One drafter process: answers every DraftRequest with trees. Its only per-request state is the KV pages.

Drafter 0 talks to verifier 0; with draft tensor parallelism it passes each request on to its peers, and all ranks grow
the same trees from the same gathered logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from drafter.drafter import Drafter, warm_up_requests
from drafter.proposers.base import (
    DraftModelProposer,
    FeatureProposer,
    decoder_tree_graphs,
    head_graphs,
    head_tree_graphs,
)
from drafter.proposers.eagle import FcHead
from drafter.proposers.eagle3 import Eagle3Head
from drafter.proposers.ngram import MatchLengths, NgramProposer
from drafter.tree.policy import make_tree_policy
from drafter.workspace import draft_workspace
from workers.comm import groups
from workers.comm.channel import Received, naming_lost_peers
from workers.comm.groups import World
from workers.comm.wire import Kind
from workers.config import EngineConfig
from workers.cuda_graphs import can_capture, decoder_graphs
from workers.gc_freeze import freeze_start_up
from workers.kernels.select import TORCH, Kernels, kernels_for
from workers.kv_cache import KVPool, kv_dtype
from workers.kv_sizing import agree_on_pages
from workers.models.load import load_decoder
from workers.models.specs import DraftSpec, Eagle3Spec, FcHeadSpec, ModelSpec, Specs
from workers.pulse import PULSE
from workers.sampling.grammar import MASK_SECONDS, Grammars, TokenTable
from workers.types import DraftRequest

logger = logging.getLogger(__name__)


def run(
    config: EngineConfig,
    specs: Specs,
    rank: int,
    store_address: str,
    *,
    link: str | None = None,
    on_joined: Callable[[], None] | None = None,
) -> None:
    """Serve draft requests until verifier 0 sends STOP; errors such as PeerLost end it early.

    link: for the ranks that replace a lost drafter, the address at which verifier 0 offers a link. on_joined: called
    when all ranks are connected and have loaded their models.
    """
    assert config.draft is not None
    world = (groups.join if link is None else groups.join_successors)(config, rank, store_address)
    logger.info("%s: joined the engine's ranks", world.role)
    is_model = config.draft.method != "ngram"
    kernels = kernels_for(world.device, config.kernels, config.enforce_eager) if is_model else TORCH
    proposer = _load(world, specs, kernels)
    report: dict[str, str | int] = {}
    for graphs in (proposer.graphs, proposer.tree_graphs):
        if graphs is not None:
            report |= graphs.report
            logger.info("%s: captured CUDA graphs: %s", world.role, graphs.report)
    grammars = Grammars(
        TokenTable.of(config, specs.target.vocab_size),
        config.max_num_seqs,
        mask_seconds=MASK_SECONDS if world.tp.size == 1 else math.inf,
    )
    drafter = Drafter(
        proposer,
        make_tree_policy(config.draft.tree),
        is_hybrid=config.draft.acceptance.sample_method == "hybrid",
        kernels=kernels,
        grammars=grammars,
    )
    if not isinstance(proposer, NgramProposer):
        for request in warm_up_requests(config, proposer.width):
            drafter.draft(request)
    world.gather_topology(report)
    if on_joined is not None:
        on_joined()
    freeze_start_up()
    if link is not None and world.leads:
        world = world.connected(link)
    _serve(world, drafter, has_noise=is_model)
    if proposer.graphs is not None:
        proposer.graphs.release()
    groups.leave()
    logger.info("%s: stopped", world.role)


def _serve(world: World, drafter: Drafter, *, has_noise: bool) -> None:
    """Answer verifier 0 until it says STOP. has_noise: the drafter reads rows of noise, not single tokens' noise."""
    has_started = False
    PULSE.serve()
    while (received := _next_message(world)).kind != Kind.STOP:
        if not has_started:  # and so have the others
            world.end_start_up()
            has_started = True
        if received.kind == Kind.HEARTBEAT:
            continue
        assert isinstance(received.message, DraftRequest)
        with naming_lost_peers(world.role, received.step):
            reply = drafter.draft(received.message)
        if world.link is not None:
            world.link.send(reply, received.step)
        if has_noise:
            drafter.prefetch_noise(received.message, world.device)


def _next_message(world: World) -> Received:
    """Receive verifier 0's next message, on every drafter rank."""
    if world.link is None:
        assert world.peers is not None
        return world.peers.receive()
    received = world.link.receive()
    if world.peers is not None:
        match received.kind:
            case Kind.STOP:
                world.peers.stop(received.step)
            case Kind.HEARTBEAT:
                world.peers.heartbeat(received.step)
            case _:
                assert received.message is not None
                world.peers.send(received.message, received.step)
    return received


def _load(world: World, specs: Specs, kernels: Kernels) -> FeatureProposer | DraftModelProposer | NgramProposer:
    """Load this rank's proposer, with a KV pool of the number of pages that all ranks agree on."""
    config, draft, spec = world.config, world.config.draft, specs.draft
    assert draft is not None
    dtype, kv_type = getattr(torch, config.dtype), kv_dtype(config, kernels, world.device)
    has_graphs = can_capture(kernels, world.device, config.enforce_eager)
    has_tree_graphs = has_graphs and world.tp.size == 1  # with tensor parallelism they would capture collectives
    match spec:
        case Eagle3Spec() | FcHeadSpec():
            location = draft.model_path, config.model_path, world.tp, world.device, dtype, kernels
            head = Eagle3Head.load(spec, *location) if isinstance(spec, Eagle3Spec) else FcHead.load(spec, *location)
            kv = head.new_kv_pool(_num_slots(world, spec, head.bytes_per_slot(kv_type)), kv_type)
            graphs = head_graphs(head, kv, config) if has_graphs else None
            tree_graphs = head_tree_graphs(head, kv, config) if has_tree_graphs else None
            return FeatureProposer(head, kv, config.page_size, config.tree_rows, graphs, tree_graphs)
        case None:
            num_pages = agree_on_pages(world, NgramProposer.BYTES_PER_SLOT)
            lengths = MatchLengths(draft.prompt_lookup_min, draft.prompt_lookup_max)
            return NgramProposer(lengths, specs.target.vocab_size, num_pages, config.page_size)
        case ModelSpec():
            model = load_decoder(
                draft.model_path,
                spec,
                world.tp,
                world.device,
                dtype,
                kernels=kernels,
                max_model_len=config.max_model_len,
            )
            slot_bytes = KVPool.bytes_per_slot(spec.num_layers, model.heads.num_kv_heads, spec.head_dim, kv_type)
            kv = model.new_kv_pool(_num_slots(world, spec, slot_bytes), kv_type)
            graphs = tree_graphs = None
            if has_graphs and model.can_be_captured:
                graphs = decoder_graphs(model, kv, config)
                tree_graphs = decoder_tree_graphs(model, kv, config) if has_tree_graphs else None
            return DraftModelProposer(model, kv, config.page_size, graphs, tree_graphs)


def _num_slots(world: World, spec: DraftSpec, slot_bytes: int) -> int:
    """Return the size of this rank's pool: the pages that all ranks agree on."""
    workspace = draft_workspace(world.config, spec).total
    return agree_on_pages(world, slot_bytes, bytes_beside=workspace) * world.config.page_size
