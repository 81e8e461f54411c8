"""One verifier process: rank 0 runs the engine loop, the others follow it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from verifier.adaptive.cost_model import UNPROFILED
from verifier.adaptive.profile import profile, profile_drafting
from verifier.engine import Engine
from verifier.hidden_states import HiddenStatePool, max_buffered_states
from verifier.target import Fuse, Target
from verifier.warm_up import warm_up
from verifier.workspace import target_workspace
from workers.comm import groups, ipc
from workers.comm.groups import World
from workers.comm.wire import Kind
from workers.config import EngineConfig
from workers.cuda_graphs import can_capture, decoder_graphs
from workers.gc_freeze import freeze_start_up
from workers.kernels.select import Kernels, kernels_for
from workers.kv_cache import KVPool, kv_dtype
from workers.kv_sizing import agree_on_pages
from workers.models.draft_methods import has_swappable_head, method_of
from workers.models.fusion import load_fusion
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.specs import Specs
from workers.pulse import PULSE
from workers.sampling.grammar import MASK_SECONDS, Grammars, TokenTable

logger = logging.getLogger(__name__)


def run(
    config: EngineConfig,
    specs: Specs,
    rank: int,
    store_address: str,
    *,
    front: str | None = None,
    on_joined: Callable[[], None] | None = None,
) -> None:
    """Serve until the engine stops.

    front: for rank 0, the address on which its service front listens. on_joined: called when all ranks are connected
    and have loaded their models.
    Raises PeerLost if a rank is lost, and ValueError if the configuration is wrong.
    """
    assert (rank == 0) == (front is not None), "exactly rank 0 has a front"
    world = groups.join(config, rank, store_address)
    logger.info("%s: joined the engine's ranks", world.role)
    target, num_pages = load(world, specs)
    topology = world.gather_topology({} if target.graphs is None else target.graphs.report)
    if on_joined is not None:
        on_joined()
    if front is None:
        freeze_start_up()
        target.follow(until=Kind.HEARTBEAT)  # the steps of rank 0's start-up
        PULSE.serve()
        world.end_start_up()
        target.follow(until=Kind.STOP)
    else:
        needs_profile = config.draft is not None and config.draft.tree.prune.simulated_costs is None
        warm_up(target, config, num_pages)
        row_costs, exchanges = UNPROFILED, []
        if needs_profile:
            row_costs = profile(target, config, num_pages)
            exchanges = profile_drafting(target, world.link, config)
        freeze_start_up()  # before Ready is sent
        PULSE.serve()
        world.end_start_up()
        target.heartbeat(0)
        if world.link is not None:
            world.link.heartbeat(0)
        ready = ipc.Ready(
            topology=topology,
            max_model_len=config.max_model_len,
            vocab_size=specs.target.vocab_size,
            num_pages=num_pages,
            num_state_checkpoints=config.num_state_checkpoints if target.has_states else 0,
        )
        socket = ipc.FrontSockets(ipc.connect(front), ready)
        may_lose = config.draft is not None and config.draft.fallback
        offer_link = world.offer_link if may_lose else None
        load_fuse = partial(_load_fuse, world, specs) if has_swappable_head(config.draft) else None
        engine = Engine(config, target, world.link, socket, num_pages, row_costs, offer_link, load_fuse, exchanges)
        try:
            engine.run()
        except ipc.FrontGone:
            engine.stop()
        finally:
            socket.close()
    if target.graphs is not None:
        target.graphs.release()
    groups.leave()
    logger.info("%s: stopped", world.role)


def load(world: World, specs: Specs, graphs_of: EngineConfig | None = None) -> tuple[Target, int]:
    """Load this rank's target; return it with the number of KV pages that all ranks agreed on.

    graphs_of: the engine configuration whose steps are captured as CUDA graphs, if not the world's.
    """
    config, spec = world.config, specs.target
    dtype = getattr(torch, config.dtype)
    features = _feature_source(world, specs)
    invariant = config.max_model_len if config.batch_invariant else None
    kernels = kernels_for(world.device, config.kernels, config.enforce_eager, batch_invariant=invariant)
    kv_type = kv_dtype(config, kernels, world.device)
    logger.info("%s: %s kernels on %s", world.role, kernels.NAME, world.device)
    decoder = load_decoder(
        config.model_path,
        spec,
        Runtime(tp=world.tp, device=world.device, dtype=dtype, kernels=kernels),
        features.tap_layers,
        config.max_model_len,
    )
    state_pool = None
    if features.fuse is not None:
        state_pool = HiddenStatePool(max_buffered_states(config), features.width, dtype=dtype, device=world.device)
    slot_bytes = decoder.bytes_per_slot(kv_type)
    page_bytes = features.width * dtype.itemsize  # rank 0 keeps one state per page, see verifier.prefix_cache
    workspace = target_workspace(config, spec, num_taps=len(features.tap_layers), state_width=features.width)
    num_pages = agree_on_pages(world, slot_bytes + -(-page_bytes // config.page_size), bytes_beside=workspace.total)
    if spec.delta is not None and world.leads:
        logger.info("%s: a hybrid: it reads text alone", world.role)
    seats, tree_rows = config.num_seats, config.max_num_seqs * config.tree_rows
    kv = decoder.new_kv_pool(num_pages * config.page_size, kv_type, num_seats=seats, num_tree_rows=tree_rows)
    _compile_moves(kernels, kv, config)
    graphs = None
    if can_capture(kernels, world.device, config.enforce_eager) and decoder.can_be_captured:
        graphs = decoder_graphs(decoder, kv, graphs_of or config)
        logger.info("%s: captured graphs, %s", world.role, graphs.report)
    grammars = Grammars(
        TokenTable.of(config, spec.vocab_size),
        config.max_num_seqs,
        mask_seconds=MASK_SECONDS if world.tp.rank == 0 else math.inf,
        is_alone=world.tp.size == 1,
    )
    target = Target(decoder, kv, config.page_size, world.peers, features.fuse, state_pool, graphs, grammars)
    return target, num_pages


@torch.inference_mode()
def _compile_moves(kernels: Kernels, kv: KVPool, config: EngineConfig) -> None:
    """Compile the move of accepted paths before the first request arrives.

    Beyond a few tokens `copy_slots` is specialised for every power of 2, up to the most tokens that a step moves.
    """
    if config.draft is None:
        return
    most = config.max_num_seqs * config.draft.tree.longest_path
    for count in (1 << power for power in range((most - 1).bit_length() + 1)):
        slots = torch.zeros(count, dtype=torch.int64, device=kv.data.device)
        kernels.copy_slots(kv.data, slots, slots)


class _FeatureSource(NamedTuple):
    """How the features for the drafter are made: the fusion, the width of a state, and the tapped layers."""

    fuse: Fuse | None = None
    width: int = 0
    tap_layers: tuple[int, ...] = ()


def _feature_source(world: World, specs: Specs) -> _FeatureSource:
    draft, head = world.config.draft, specs.draft
    if not world.leads or draft is None or head is None or not method_of(draft).reads_features:
        return _FeatureSource()
    width, fuse = specs.target.hidden_size, _load_fuse(world, specs, draft.model_path)
    return _FeatureSource(fuse, max(1, len(head.tap_layers)) * width, head.tap_layers)


def _load_fuse(world: World, specs: Specs, path: str) -> Fuse:
    """Read the fusion of a head of the shape that `specs` describes. Raises ValueError, OSError."""
    assert specs.draft is not None
    fusion = load_fusion(path, specs.draft, world.device, getattr(torch, world.config.dtype))
    return fusion if fusion is not None else lambda state_ND: state_ND
