"""One drafter process: answers every DraftRequest with trees. Its only per-request state is the KV pages.

Drafter 0 talks to verifier 0; with draft tensor parallelism it passes each request on to its peers, and all ranks grow
the same trees from the same gathered logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafter.drafter import Drafter, warm_up_requests
from drafter.head_loader import HeadLoader
from drafter.learning.canary import Canary, ScoredHead
from drafter.learning.learner import Learner, Slices
from drafter.methods import load_another_head, load_proposer
from drafter.proposers.base import HeadProposer
from drafter.proposers.feature_head import load_embedding
from drafter.tree.policy import make_tree_policy
from drafter.tree.tree_graphs import TreeGraphs
from workers.comm import groups
from workers.comm.channel import Received, naming_lost_peers
from workers.comm.groups import World
from workers.comm.wire import Kind
from workers.config import DraftConfig, EngineConfig
from workers.cuda_graphs import Graphs
from workers.gc_freeze import freeze_start_up
from workers.kernels.select import TORCH, kernels_for
from workers.models.checkpoint import Weights
from workers.models.draft_methods import method_of
from workers.models.specs import Eagle3Spec, Specs
from workers.pulse import PULSE
from workers.sampling.grammar import MASK_SECONDS, Grammars, TokenTable
from workers.settings import HeadAction
from workers.types import DraftRequest, HeadProgress, NewHead, as_bytes, as_text

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
    is_model = method_of(config.draft).is_model
    kernels = kernels_for(world.device, config.kernels, config.enforce_eager) if is_model else TORCH
    proposer = load_proposer(world, specs, kernels)
    report: dict[str, str | int] = {}
    for graphs in (proposer.graphs, proposer.tree_graphs):
        if isinstance(graphs, Graphs | TreeGraphs):
            report |= graphs.report
            logger.info("%s: captured CUDA graphs: %s", world.role, graphs.report)
    grammars = Grammars(
        TokenTable.of(config, specs.target.vocab_size),
        config.max_num_seqs,
        mask_seconds=MASK_SECONDS if world.tp.size == 1 else math.inf,
    )
    has_marginals = specs.draft is not None and specs.draft.has_marginals
    drafter = Drafter(
        proposer,
        make_tree_policy(config.draft.tree, has_leaf_siblings=has_marginals),
        is_hybrid=config.draft.acceptance.sample_method == "hybrid",
        max_depth=None if specs.draft is None else specs.draft.max_depth,
        kernels=kernels,
        grammars=grammars,
    )
    if is_model:
        for request in warm_up_requests(config, proposer.width):
            drafter.draft(request)
    world.gather_topology(report)
    if on_joined is not None:
        on_joined()
    freeze_start_up()
    if link is not None and world.leads:
        world = world.connected(link)
    heads = learner = None
    if isinstance(proposer, HeadProposer):
        load, score = partial(load_another_head, world, specs, kernels), partial(_canary, config, specs, proposer)
        heads = HeadLoader(world, load, proposer.take, score, config.draft.model_path)
        learner = _learner(config.draft, specs, proposer)
    _serve(world, drafter, heads, learner, has_noise=is_model and not isinstance(proposer.tree_graphs, TreeGraphs))
    if proposer.graphs is not None:
        proposer.graphs.release()
    groups.leave()
    logger.info("%s: stopped", world.role)


def _learner(draft: DraftConfig, specs: Specs, proposer: HeadProposer[Any]) -> Learner | None:
    if not draft.learning_path:
        return None
    assert isinstance(specs.draft, Eagle3Spec), "others are refused before"
    return Learner(specs.draft, draft.model_path, draft.learning_path, proposer.embed, _target_ids(proposer))


def _canary(
    config: EngineConfig, specs: Specs, proposer: HeadProposer[Any], serving: str, candidate: str, num_steps: int
) -> Canary:
    """Load a head that is to be scored, and the serving one as it is scored. Raises ValueError, OSError."""
    spec, dtype = specs.draft, getattr(torch, config.dtype)
    assert isinstance(spec, Eagle3Spec), "others are refused before"
    embedding_VH = load_embedding(Weights(candidate, dtype), Weights(config.model_path, dtype), spec.layers)
    heads = (
        ScoredHead.load(spec, serving, proposer.embed),
        ScoredHead.load(spec, candidate, embedding_VH.__getitem__),
    )
    return Canary(heads, _target_ids(proposer), spec.layers.vocab_size, candidate, num_steps)


def _target_ids(proposer: HeadProposer[Any]) -> Tensor:
    ids = proposer.vocab.target_ids
    return torch.arange(proposer.vocab.size) if ids is None else ids.clone()


def _serve(
    world: World, drafter: Drafter, heads: HeadLoader | None, learner: Learner | None, *, has_noise: bool
) -> None:
    """Answer verifier 0 until it says STOP.

    heads: None = the drafter is no head. learner: None = it does not learn. has_noise: trees are grown from rows of
    noise, neither from single tokens' noise nor from what graphs compute.
    """
    has_started = False
    PULSE.serve()
    while (received := _next_message(world, own := _slices(heads, learner))).kind != Kind.STOP:
        if not has_started:  # and so have the others
            world.end_start_up()
            has_started = True
        if received.kind == Kind.HEARTBEAT:
            continue
        if isinstance(received.message, NewHead):
            assert heads is not None
            with naming_lost_peers(world.role, received.step):
                state = heads.answer(received.message)
            drafts = received.message.action == HeadAction.TAKE and state.progress == HeadProgress.TAKEN
            if learner is not None and drafts:
                learner.rebase(as_text(received.message.path_U))
            if world.link is not None:
                world.link.send(state, received.step)
            continue
        assert isinstance(received.message, DraftRequest)
        if own is not None:
            own.began()
        with naming_lost_peers(world.role, received.step):
            reply = drafter.draft(received.message)
        is_answered = received.message.is_answered
        if is_answered and learner is not None and (learnt := learner.offer()) is not None:
            reply = replace(reply, learnt_U=as_bytes(learnt))
        if world.link is not None and is_answered:
            world.link.send(reply, received.step)
        if has_noise:
            drafter.prefetch_noise(received.message, world.device)
        if own is not None:
            own.saw(received.message)


def _slices(heads: HeadLoader | None, learner: Learner | None) -> Slices | None:
    """Return what runs in slices between two messages: the learner, or a head that is scored beside the serving one."""
    return heads.canary if learner is None and heads is not None else learner


def _next_message(world: World, own: Slices | None) -> Received:
    """Receive verifier 0's next message, on every drafter rank, and run slices until it comes."""
    if world.link is None:
        assert world.peers is not None
        return world.peers.receive()
    while own is not None and own.has_work and not world.link.has_frame(own.wait_s):
        own.work()
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
