"""The bundled pair in this very process, on a clock that moves by chosen prices: what `auto` earns, free of noise."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from unittest import mock

import numpy as np
from engines import BUNDLED, DYNAMIC, bundled, prompts
from fakes import FakeChannel

from drafter.eagle3 import Eagle3Head
from drafter.level import Level
from drafter.propose import FeatureProposer
from drafter.shape import make_shape
from verifier import engine
from verifier.costs import RowCosts
from verifier.target import Target
from workers.checkpoint import read_spec
from workers.eagle3_format import FeatureFusion, read_eagle3_spec
from workers.ipc import Decoder as Frames
from workers.ipc import EngineStats, FrameSocket, Speculation, StepOutput, Submit, encode
from workers.model import Decoder
from workers.types import DraftRequest, SamplingParams, TargetStep

OFF, FIXED, AUTO = Speculation(enabled=False), Speculation(auto=False), Speculation(auto=True)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Milliseconds. A step takes fixed + row x rows of the target, and the drafter message + fed x rows fed + level x
    levels + node x nodes run. What no start-up table tells: a request with a tree takes `tree` more."""

    fixed: float
    row: float
    message: float
    fed: float
    level: float
    node: float
    tree: float = 0.0

    @property
    def rows(self) -> RowCosts:
        return RowCosts(np.array([1.0, 512.0]), self.fixed + self.row * np.array([1.0, 512.0]))


@dataclass(frozen=True)
class Run:
    """What some prompts took and gave."""

    tokens: list[list[int]]
    milliseconds: float
    stats: EngineStats

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.milliseconds

    @property
    def acceptance_length(self) -> float:
        return 1 + self.stats.num_accepted_tokens / max(1, self.stats.num_drafts)

    @property
    def verified_per_token(self) -> float:
        return self.stats.num_verified_tokens / sum(map(len, self.tokens))


@dataclass
class Clock:
    """Moves when the two models run, and at no other time."""

    prices: Prices
    ms: float = 0.0

    def seconds(self) -> float:
        return self.ms / 1e3


class _Target(Target):
    clock: Clock

    def run(self, step: TargetStep, number: int) -> list[int]:
        prices, first_rows = self.clock.prices, step.query_offsets[:-1].long()
        has_tree_B = (step.ancestors_N[first_rows] != 0) & (step.query_offsets.diff() > 1)
        self.clock.ms += prices.fixed + prices.row * len(step.token_N) + prices.tree * int(has_tree_B.sum())
        return super().run(step, number)


class _Proposer(FeatureProposer):
    clock: Clock

    def extend(self, request: DraftRequest):  # type: ignore[no-untyped-def]
        prices = self.clock.prices
        self.clock.ms += prices.message + prices.level + prices.fed * len(request.token_M)
        return super().extend(request)

    def expand(self, level: Level):  # type: ignore[no-untyped-def]
        self.clock.ms += self.clock.prices.level + self.clock.prices.node * len(level.request_F)
        return super().expand(level)


@cache
def _pair() -> tuple[Decoder, FeatureFusion, Eagle3Head]:
    target = BUNDLED / "target"
    head = read_eagle3_spec(BUNDLED / "eagle3", read_spec(target))
    decoder = Decoder.load(target, read_spec(target), tap_layers=head.tap_layers)
    fusion = FeatureFusion.load(BUNDLED / "eagle3", head, device=decoder.device, dtype=decoder.dtype)
    return decoder, fusion, Eagle3Head.load(BUNDLED / "eagle3", target)


@dataclass
class Bench:
    """One engine and its front; see `bench`."""

    engine: engine.Engine
    front: socket.socket
    clock: Clock
    _frames: Frames = field(default_factory=Frames)
    _num_submitted: int = 0

    def run(
        self, speculation: Speculation, batch: int, temperature: float, num_prompts: int = 12, num_tokens: int = 64
    ) -> Run:
        """Answers to the bundled prompts, `batch` at a time."""
        began, self.engine._stats = self.clock.ms, EngineStats(steps=self.engine._stats.steps)
        waiting = list(enumerate(prompts(num_prompts)))
        tokens: dict[int, list[int]] = {}
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < batch:
                number, prompt = waiting.pop(0)
                sampling = SamplingParams(temperature=temperature, seed=number)
                submit = Submit(
                    id=self._num_submitted, prompt=prompt, max_tokens=num_tokens, sampling=sampling, ignore_eos=True,
                    speculation=speculation,
                )  # fmt: skip
                self.front.sendall(encode(submit))
                tokens[self._num_submitted] = []
                self._num_submitted += 1
                num_open += 1
            self.engine.step()
            for chunk in self._chunks():
                tokens[chunk.id] += chunk.tokens
                num_open -= chunk.finish_reason is not None
        return Run(list(tokens.values()), self.clock.ms - began, self.engine._stats)

    def _chunks(self):  # type: ignore[no-untyped-def]
        try:
            data = self.front.recv(1 << 20)
        except BlockingIOError:
            return
        for frame in self._frames.feed(data):
            assert isinstance(frame, StepOutput)
            yield from frame.chunks


@contextmanager
def bench(prices: Prices, row_costs: RowCosts | None = None) -> Iterator[Bench]:
    """An engine with trees of 16 nodes. row_costs: what start-up measured, if not the truth."""
    config = bundled(DYNAMIC, enable_prefix_caching=False)  # the same prompts come again and again
    num_pages = 1 + config.max_num_seqs * (config.max_model_len // config.page_size)
    clock = Clock(prices)
    decoder, fusion, head = _pair()
    kv, draft_kv = (model.new_kv_pool(num_pages * config.page_size) for model in (decoder, head))
    target = _Target(decoder, kv, config.page_size, None, fusion)
    proposer = _Proposer(head, draft_kv, config.page_size, config.tree_rows)
    target.clock = proposer.clock = clock
    engine_end, front = socket.socketpair()
    front.setblocking(False)
    socket_end = FrameSocket(engine_end)
    channel = FakeChannel(proposer, make_shape(DYNAMIC))  # type: ignore[arg-type]
    with mock.patch.object(engine, "time", SimpleNamespace(perf_counter=clock.seconds, monotonic=clock.seconds)):
        yield Bench(
            engine.Engine(config, target, channel, socket_end, num_pages, row_costs or prices.rows),
            front,
            clock,  # type: ignore[arg-type]
        )
    front.close()
    socket_end.close()
