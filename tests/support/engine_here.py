"""An engine in this process: the real target and drafter, which exchange serialized messages, and a front.

The drafter is the EAGLE-3 head, or what `proposer` makes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from drafter.drafter import Drafter
from drafter.proposers.base import FeatureProposer, Proposer
from drafter.proposers.eagle3 import Eagle3Head
from drafter.proposers.feature_head import FeatureHead
from drafter.tree.policy import make_tree_policy
from tests.support.fakes import FakeChannel
from verifier.adaptive.cost_model import RowCosts
from verifier.adaptive.profile import profile, profile_drafting
from verifier.engine import Engine
from verifier.hidden_states import HiddenStatePool, max_buffered_states
from verifier.target import Target
from workers.comm.groups import World
from workers.comm.ipc import FrameDecoder, FrameSocket, HeadSwapped, StepOutput, Submit, TokenChunk, encode
from workers.config import EngineConfig
from workers.kv_cache import kv_dtype
from workers.models.base import BaseDecoder
from workers.models.draft_methods import method_of
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.fusion import load_fusion
from workers.models.layers import TensorParallel
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.grammar import Grammars, TokenTable


@dataclass(frozen=True)
class Pair:
    """A loaded target and its head, for any number of engines."""

    decoder: BaseDecoder
    fusion: Callable[[Tensor], Tensor]
    head: FeatureHead

    @staticmethod
    def load(target_path: Path | str, head_path: Path | str) -> Pair:
        spec = read_spec(target_path)
        head = read_eagle3_spec(head_path, spec)
        fusion = load_fusion(head_path, head)
        assert fusion is not None
        return Pair(
            load_decoder(target_path, spec, tap_layers=head.tap_layers),
            fusion,
            Eagle3Head.load(head, head_path, target_path),
        )


@dataclass
class EngineHere:
    """See `engine_here`."""

    engine: Engine
    drafter: FakeChannel | None
    _front: socket.socket
    _frames: FrameDecoder = field(default_factory=FrameDecoder)
    swaps: list[HeadSwapped] = field(default_factory=list)

    def submit(self, submit: Submit) -> None:
        self._front.sendall(encode(submit))

    def step(self) -> list[TokenChunk]:
        """Run one step and return the messages to the front."""
        self.engine.step()
        try:
            data = self._front.recv(1 << 20)
        except BlockingIOError:
            return []
        chunks: list[TokenChunk] = []
        for frame in self._frames.feed(data):
            if isinstance(frame, HeadSwapped):
                self.swaps.append(frame)
            else:
                assert isinstance(frame, StepOutput)
                chunks += frame.chunks
        return chunks


class Alone(World):
    """A rank that sizes its pools without peers."""

    @classmethod
    def of(cls, config: EngineConfig, rank: int, device: torch.device) -> Alone:
        tp = TensorParallel(rank=0, size=1)
        return cls(config=config, rank=rank, role=config.role_of(rank), device=device, tp=tp, peers=None, link=None)

    def gather_number(self, value: int) -> list[int]:
        return [value] * self.config.world_size

    def agree_on_minimum(self, value: int) -> int:
        return value


@contextmanager
def engine_here(
    config: EngineConfig,
    pair: Pair,
    row_costs: RowCosts | None = None,
    *,
    target: Callable[..., Target] = Target,
    proposer: Callable[..., Proposer] = FeatureProposer,
    drafter: Callable[..., Drafter] = Drafter,
) -> Iterator[EngineHere]:
    """Start an engine. row_costs: None = measured. target, proposer, drafter: factories with the classes' arguments."""
    assert config.num_pages is not None
    num_slots = config.num_pages * config.page_size
    fusion = waiting = None
    width, cpu = max(1, len(pair.decoder.tap_layers)) * pair.decoder.spec.hidden_size, torch.device("cpu")
    if config.draft is not None and method_of(config.draft).reads_features:
        fusion = pair.fusion
        waiting = HiddenStatePool(max_buffered_states(config), width, dtype=torch.float32, device=cpu)
    kv_type = kv_dtype(config, pair.decoder.kernels, cpu)
    seats, tree_rows = config.num_seats, config.max_num_seqs * config.tree_rows
    kv = pair.decoder.new_kv_pool(num_slots, kv_type, num_seats=seats, num_tree_rows=tree_rows)
    verifier = target(pair.decoder, kv, config.page_size, None, fusion, waiting)
    vocab_size = pair.decoder.spec.vocab_size
    verifier.grammars = Grammars(TokenTable.of(config, vocab_size))
    channel = None
    if config.draft is not None:
        own = proposer(pair.head, pair.head.new_kv_pool(num_slots, kv_type), config.page_size, config.tree_rows)
        channel = FakeChannel(
            drafter(
                own,
                make_tree_policy(config.draft.tree),
                is_hybrid=config.draft.acceptance.sample_method == "hybrid",
                grammars=Grammars(TokenTable.of(config, vocab_size)),
            )
        )
    engine_end, front = socket.socketpair()
    front.setblocking(False)
    with engine_end, front:
        exchanges = profile_drafting(verifier, channel, config) if channel else []  # type: ignore[arg-type]
        engine = Engine(
            config, verifier, channel, FrameSocket(engine_end), config.num_pages,  # type: ignore[arg-type]
            row_costs or profile(verifier, config, config.num_pages), exchanges=exchanges,
        )  # fmt: skip
        yield EngineHere(engine, channel, front)
