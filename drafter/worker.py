"""One drafter process: answers every DraftRequest with trees. Its only per-request state is the KV pages.

Drafter 0 talks to verifier 0; with draft tensor parallelism it passes each request on to its peers, and all ranks grow
the same trees from the same gathered logits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drafter.predraft import PreDrafter
from drafter.proposers.base import (
    DraftModelProposer,
    FeatureProposer,
    Proposer,
    decoder_tree_graphs,
    head_graphs,
    head_tree_graphs,
)
from drafter.proposers.eagle import FcHead
from drafter.proposers.eagle3 import Eagle3Head
from drafter.proposers.ngram import MatchLengths, NgramProposer
from drafter.tree.frontier import DraftVocabulary, GrowLimits, RootLogits
from drafter.tree.grow import GrownTrees, grow
from drafter.tree.policy import TreePolicy, make_tree_policy
from drafter.workspace import draft_workspace
from workers import trace
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
from workers.sampling.logits_state import LogitsState, pack_logits_states, unpack_logits_states
from workers.settings import Rule, SamplingSettings
from workers.types import DraftCosts, DraftReply, DraftRequest, SamplingBatch

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
    is_hybrid, policy = config.draft.acceptance.sample_method == "hybrid", make_tree_policy(config.draft.tree)
    report: dict[str, str | int] = {}
    for graphs in (proposer.graphs, proposer.tree_graphs):
        if graphs is not None:
            report |= graphs.report
            logger.info("%s: captured CUDA graphs: %s", world.role, graphs.report)
    if not isinstance(proposer, NgramProposer):
        for request in warm_up_requests(config, proposer.width):
            draft(request, proposer, policy, is_hybrid=is_hybrid, kernels=kernels)
    world.gather_topology(report)
    if on_joined is not None:
        on_joined()
    freeze_start_up()
    grammars = Grammars(
        TokenTable.of(config, specs.target.vocab_size),
        config.max_num_seqs,
        mask_seconds=MASK_SECONDS if world.tp.size == 1 else math.inf,
    )
    if link is not None and world.leads:
        world = world.connected(link)
    _serve(world, proposer, policy, is_hybrid, kernels, grammars)
    if proposer.graphs is not None:
        proposer.graphs.release()
    groups.leave()
    logger.info("%s: stopped", world.role)


def _serve(
    world: World,
    proposer: FeatureProposer | DraftModelProposer | NgramProposer,
    policy: TreePolicy,
    is_hybrid: bool,
    kernels: Kernels,
    grammars: Grammars,
) -> None:
    config = world.config
    ahead = None
    if config.has_predrafting:
        assert not isinstance(proposer, NgramProposer)
        grow_each = partial(
            grow_trees, proposer=proposer, policy=policy, is_hybrid=is_hybrid, kernels=kernels, grammars=grammars
        )
        ahead = PreDrafter(
            proposer,
            grow_each,
            page_size=config.page_size,
            scratch=range(proposer.num_pages - config.scratch_pages, proposer.num_pages),
            outcome_pages=config.outcome_pages,
            is_forced=config.draft is not None and config.draft.overlap == "predraft",
        )
    has_waited = has_started = False
    PULSE.serve()
    while (received := _next_message(world)).kind != Kind.STOP:
        if not has_started:  # and so have the others
            world.end_start_up()
            has_started = True
        if received.kind == Kind.HEARTBEAT:
            continue
        assert isinstance(received.message, DraftRequest)
        began = time.perf_counter()
        with naming_lost_peers(world.role, received.step):
            if ahead is not None:
                reply = ahead.reply(received.message, has_waited=has_waited)
            else:
                reply = draft(
                    received.message, proposer, policy, is_hybrid=is_hybrid, kernels=kernels, grammars=grammars
                )
        if world.link is not None:
            world.link.send(reply, received.step)
        replied_at = time.perf_counter()
        trace.record("draft", began, replied_at)
        if not isinstance(proposer, NgramProposer):
            prefetch_noise(received.message, proposer.vocab, world.device)
        if ahead is not None:
            assert world.link is not None, "pre-drafting is for a drafter without peers"
            ahead.draft_ahead(world.link.has_frame)
            has_waited = world.link.has_frame()
        trace.record("draft ahead", replied_at, time.perf_counter())


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


@torch.inference_mode()
def draft(
    request: DraftRequest,
    proposer: Proposer,
    policy: TreePolicy,
    *,
    is_hybrid: bool = False,
    kernels: Kernels = TORCH,
    grammars: Grammars | None = None,
) -> DraftReply:
    """Feed the new rows and grow one tree for each request that wants one."""
    began = time.perf_counter()
    roots = proposer.extend(request)
    grown = grow_trees(request, roots, proposer, policy, is_hybrid=is_hybrid, kernels=kernels, grammars=grammars)
    return grown.reply(time.perf_counter() - began)


def grow_trees(
    request: DraftRequest,
    roots: RootLogits,
    proposer: Proposer,
    policy: TreePolicy,
    *,
    is_hybrid: bool = False,
    kernels: Kernels = TORCH,
    grammars: Grammars | None = None,
) -> GrownTrees:
    """Grow one tree for each request that wants one, given the distributions at the roots, whose rows are fed."""
    is_growing_B = request.num_nodes_B.numpy() > 0
    own: Callable[[Tensor], np.ndarray]
    if is_growing_B.all():  # nearly always
        own, sampling = Tensor.numpy, request.sampling
    else:
        own, sampling = (
            lambda column: column.numpy()[is_growing_B],
            request.sampling.rows(torch.from_numpy(is_growing_B)),
        )
    offsets = request.offsets.numpy()
    last_row_G = offsets[1:][is_growing_B] - 1
    return grow(
        roots,
        request.token_M.numpy()[last_row_G],
        own(request.start_B).astype(np.int64) + (offsets[1:] - offsets[:-1])[is_growing_B],
        limits=GrowLimits(
            num_nodes_B=own(request.num_nodes_B),
            max_depth_B=own(request.max_depth_B),
            min_prob_B=own(request.min_prob_B),
            path_prob_B=own(request.path_prob_B),
            rule_B=own(request.rule_B),
            auto_B=own(request.auto_B),
            is_hybrid=is_hybrid,
        ),
        sampling=sampling,
        policy=policy,
        expand=proposer.expand,
        vocab=proposer.vocab,
        logits_states=_logits_states(request.constraints_U, is_growing_B),
        grammars=grammars,
        costs=request.costs,
        kernels=kernels,
        tree_graphs=proposer.tree_graphs,
        traced_B=None if request.traced_B is None else own(request.traced_B).astype(bool),
    )


def warm_up_requests(config: EngineConfig, width: int) -> list[DraftRequest]:
    """Return requests for a tree of every kind of node on the null page, whose contents are never read.

    Drafting them loads and compiles most of what is loaded or compiled on first use, before a real request waits for
    it. width: of the features; 0 = none.
    """
    assert config.draft is not None
    tree = config.draft.tree
    num_pages = config.pages_for(2)
    no_threshold_1, zero_1 = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    costs = DraftCosts(
        nodes_T=torch.tensor([0, tree.num_speculative_tokens], dtype=torch.int32),
        verify_ms_T=torch.ones(2),
        draft_ms_3=torch.zeros(3),
        base_tokens_1=torch.ones(1),
        calibration_D2=torch.tensor([[1.0, 0.0]]),
    )
    return [
        DraftRequest(
            offsets=torch.tensor([0, 1], dtype=torch.int32),
            start_B=zero_1 + 1,
            token_M=zero_1,
            page_table_BP=zero_1.expand(1, num_pages).contiguous(),
            rule_B=zero_1 + rule.value,
            auto_B=zero_1 + tree.prune.auto,
            num_nodes_B=zero_1 + tree.num_speculative_tokens,
            max_depth_B=zero_1 + tree.longest_path,
            min_prob_B=no_threshold_1,
            path_prob_B=no_threshold_1,
            constraints_U=pack_logits_states([None]),
            sampling=SamplingBatch.stack([sampling]),
            costs=costs if tree.prune.auto else None,
            features_MH=torch.zeros(1, width, dtype=getattr(torch, config.dtype)) if width else None,
        )
        for rule, sampling in (
            (Rule.COUPLED, SamplingSettings(temperature=0.0)),
            (Rule.COUPLED, SamplingSettings()),
            (Rule.TRAVERSAL, SamplingSettings(top_p=0.999)),
        )
    ]


@torch.inference_mode()
def prefetch_noise(request: DraftRequest, vocab: DraftVocabulary, device: torch.device) -> None:
    """Compute the noise that the next trees will read, wherever their roots will be, while the target verifies."""
    noisy = (request.num_nodes_B > 0) & (request.rule_B == Rule.COUPLED) & (request.sampling.temperature_B > 0)
    root_index_B = request.start_B + request.offsets.diff()
    # The next root is at most a tree's depth and one token further on; its tree may be as deep again.
    counts = 2 * request.max_depth_B + 1
    seeds, first, num = (values_B[noisy].tolist() for values_B in (request.sampling.seed_B, root_index_B, counts))
    vocab.noise.prepare(seeds, first, num, device)


def _logits_states(constraints_U: Tensor, is_growing_B: np.ndarray) -> dict[int, LogitsState]:
    """Return the state of each constrained request, by its index among the growing ones."""
    index_B = is_growing_B.cumsum() - 1
    states = unpack_logits_states(constraints_U)
    return {int(index_B[b]): logits_state for b, logits_state in states.items() if is_growing_B[b]}


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
    """Return the size of this rank's pool: the pages that all ranks agree on, and those for pre-drafting."""
    config = world.config
    scratch = config.scratch_pages * config.page_size
    beside = scratch * slot_bytes + draft_workspace(config, spec).total
    return agree_on_pages(world, slot_bytes, bytes_beside=beside) * config.page_size + scratch
