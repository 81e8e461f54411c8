"""Fake target and draft model with chosen logits, which read their prefix from paged memory.

A fake forward writes each row's token to the slot where the real one writes KV, and reads a row's context from the
slots that the row may attend to. A wrong slot, page, move or mask gives a wrong token, or fails an assertion here.
"""

from __future__ import annotations

import functools
import queue as queues
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from drafter.drafter import Drafter
from drafter.tree.frontier import DraftVocabulary, Frontier
from drafter.tree.policy import make_tree_policy
from tests.support import forked
from verifier.engine import Engine
from verifier.hidden_states import HiddenStatePool, max_buffered_states
from verifier.request import Request
from verifier.target import Target, token_logprobs
from workers.comm import groups, wire
from workers.comm.channel import PeerLost, Received
from workers.comm.groups import World
from workers.comm.ipc import Abort, DrafterLost, FrameDecoder, FrameSocket, StepOutput, Submit, TokenChunk, encode
from workers.comm.wire import Kind
from workers.config import AcceptanceConfig, DraftConfig, EngineConfig, TreeConfig
from workers.kernels.select import TORCH
from workers.sampling.sampler import draw
from workers.settings import SamplingSettings
from workers.types import AttentionMetadata, DraftReply, DraftRequest, SamplingBatch, TargetStep

# ---- languages


class RandomLanguage:
    """Logits from the last two tokens and the length; the draft model adds an error."""

    def __init__(self, vocab: int = 32, error: float = 0.7, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self._last, self._before = (rng.normal(scale=s, size=(vocab, vocab)).astype(np.float32) for s in (1.5, 1.0))
        self._length = rng.normal(scale=0.7, size=(16, vocab)).astype(np.float32)
        self._wrong = rng.normal(scale=error, size=(vocab, vocab)).astype(np.float32)

    def target(self, context: list[int]) -> np.ndarray:
        before = self._before[context[-2]] if len(context) > 1 else 0
        return self._last[context[-1]] + before + self._length[len(context) % 16]

    def draft(self, context: list[int]) -> np.ndarray:
        return self.target(context) + self._wrong[context[-1]]


class Counting:
    """Token t is followed by t + 1 with certainty; the draft model agrees, except at the tokens where it `errs`."""

    def __init__(self, vocab: int = 64, errs: tuple[int, ...] = ()) -> None:
        self.vocab, self._errs = vocab, errs

    def target(self, context: list[int]) -> np.ndarray:
        return np.where(np.arange(self.vocab) == (context[-1] + 1) % self.vocab, 200, 0).astype(np.float32)

    def draft(self, context: list[int]) -> np.ndarray:
        step = 2 if (context[-1] + 1) % self.vocab in self._errs else 1
        return np.where(np.arange(self.vocab) == (context[-1] + step) % self.vocab, 200, 0).astype(np.float32)


Language = RandomLanguage | Counting


def say(language: Language, prompt: list[int], num: int, params: SamplingSettings) -> list[int]:
    """Return the target's output after a prompt, decoded token by token."""
    tokens, batch = list(prompt), SamplingBatch.stack([params])
    for _ in range(num):
        logits_1V = torch.from_numpy(language.target(tokens))[None]
        tokens.append(int(draw(logits_1V, batch, torch.tensor([len(tokens)]))))
    return tokens[len(prompt) :]


# ---- memory and the two models


class Memory:
    """Paged slots of (position, token); reading an unwritten slot is an error."""

    def __init__(self, page_size: int, *, may_repeat: bool = False) -> None:
        self._page_size, self._may_repeat = page_size, may_repeat
        self.held: dict[int, tuple[int, int]] = {}

    def place(self, pages: list[int], slot: int) -> int:
        page = pages[slot // self._page_size]
        assert page > 0, "page 0 is nobody's"
        return page * self._page_size + slot % self._page_size

    def wipe(self, pages: list[int]) -> None:
        for page in pages:
            for place in range(page * self._page_size, (page + 1) * self._page_size):
                self.held.pop(place, None)

    def forward(self, attention: AttentionMetadata, position_N: Tensor, token_N: Tensor) -> list[list[int]]:
        """Write every row, then read every row's context in order of positions."""
        tables = attention.page_table_BP.tolist()
        owner = attention.owner_N.tolist()
        rows = list(zip(owner, attention.slot_N.tolist(), position_N.tolist(), token_N.tolist(), strict=True))
        places = [self.place(tables[b], slot) for b, slot, _, _ in rows]
        entries = {(place, row[2:]) for place, row in zip(places, rows, strict=True)}
        assert len(set(places)) == (len(entries) if self._may_repeat else len(places)), "two rows write one slot"
        self.held |= {place: (position, token) for place, (_, _, position, token) in zip(places, rows, strict=True)}
        contexts = []
        for n, (b, _, position, _) in enumerate(rows):
            mask, base = int(attention.ancestors_N[n]), int(attention.base_B[b])
            slots = [*range(int(attention.visible_N[n]))]
            slots += [base + r for r in range(64) if mask >> r & 1]
            # A drafted node may have a row that comes before its parent's: that of a node which was displaced.
            seen = sorted(self.held[self.place(tables[b], slot)] for slot in slots)
            assert [p for p, _ in seen] == list(range(position - len(seen) + 1, position + 1)), "a hole in the context"
            contexts.append([token for _, token in seen])
        return contexts


class FakeStates:
    """A fake of recurrent states: each seat holds the tokens that its state has taken in, and no more."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {0: []}
        self._stash: list[int] = []

    def forward(self, step: TargetStep, contexts: list[list[int]]) -> None:
        """Fold the last step's accepted rows, then check that each row's state and path are its context."""
        if (folds := step.folds) is not None:
            assert len(set(folds.seat_F.tolist())) == len(folds.seat_F), "two requests have one seat"
            for seat, (a, b) in zip(folds.seat_F.tolist(), pairwise(folds.offsets.tolist()), strict=True):
                before, taken = self.held[seat], [self._stash[row] for row in folds.row_A.tolist()]
                self.held[seat] = before + taken[a:b]
                self._keep(folds.keep_row_K, folds.keep_seat_K, a, b, before, taken)
        meta, tokens = step.attention, step.token_N.tolist()
        seats = [seat for seat in meta.write_seat_B.tolist() if seat]
        seats += [
            seat for seat, to in zip(meta.read_seat_B.tolist(), meta.write_seat_B.tolist(), strict=True) if not to
        ]
        kept = meta.keep_seat_K.tolist() + (folds.keep_seat_K.tolist() if folds is not None else [])
        assert len({*seats, *kept}) == len(seats + kept) and 0 not in seats, "whose seat is it?"
        assert not set(kept) & set(meta.read_seat_B.tolist()), "a state is overwritten before it is read"
        spans = list(pairwise(meta.query_offsets.tolist()))
        self._stash = []
        for (a, b), read, write in zip(spans, meta.read_seat_B.tolist(), meta.write_seat_B.tolist(), strict=True):
            for row in range(a, b):
                mask = int(meta.ancestors_N[row])
                path = [tokens[a + bit] for bit in range(64) if mask >> bit & 1] if mask else tokens[a : row + 1]
                assert self.held[read] + path == contexts[row], "the state is not that before the row's path"
            if write:
                before = self.held[read]
                self.held[write] = before + tokens[a:b]
                self._keep(meta.keep_row_K, meta.keep_seat_K, a, b, before, tokens)
            else:
                assert a == len(self._stash), "trees come first"
                self._stash += tokens[a:b]

    def _keep(self, row_K: Any, seat_K: Any, begin: int, end: int, before: list[int], tokens: list[int]) -> None:
        """Keep states behind rows begin .. end - 1, which follow the tokens `before`."""
        for row, seat in zip(row_K.tolist(), seat_K.tolist(), strict=True):
            if begin <= row < end:
                self.held[seat] = before + tokens[begin : row + 1]


class FakeTarget(Target):
    """A target over a language. A row's hidden state is its (position, token), which proves their alignment. Sampling
    is that of the real target. waiting: the hidden-state buffer, for a drafter that reads features. fake_states: those
    of a hybrid."""

    has_states = False  # type: ignore[assignment]  # set for each

    def __init__(
        self,
        language: Language,
        page_size: int,
        max_model_len: int,
        waiting: HiddenStatePool | None,
        fake_states: FakeStates | None = None,
    ) -> None:
        self.fake_states, self.has_states = fake_states, fake_states is not None
        vocab = language.vocab
        alone = SimpleNamespace(rank=0, size=1)
        spec = SimpleNamespace(vocab_size=vocab)
        decoder: Any = SimpleNamespace(
            tp=alone, spec=spec, vocab_range=(0, vocab), kernels=TORCH, logits_dtype=torch.float32, logits=torch.clone
        )
        kv: Any = None
        super().__init__(decoder, kv, page_size, None, (lambda states: states) if waiting else None, waiting)
        self._language, self._max_model_len = language, max_model_len
        self.memory = Memory(page_size)
        self.steps: list[TargetStep] = []
        self.heartbeats = 0
        self.stopped = False

    def run(self, step: TargetStep, number: int, while_waiting: Callable[[], None] = lambda: None) -> list[int]:
        assert number == len(self.steps)
        while_waiting()
        self.steps.append(step)
        self._raw_RV = None
        held = self.memory.held
        moved = [held[source] for source in step.copy_source.tolist()]
        held |= dict(zip(step.copy_target.tolist(), moved, strict=True))
        assert int(step.position_N.max()) < self._max_model_len
        contexts = self.memory.forward(step.attention, step.position_N, step.token_N)
        if self.fake_states is not None:
            self.fake_states.forward(step, contexts)
        if step.scored is not None:
            told = [self._language.target(contexts[row]) for row in step.scored.row_S.tolist()]
            args = (step.scored.token_S.tolist(), step.scored.num_top_S.tolist())
            self._scores_S = token_logprobs(torch.from_numpy(np.stack(told)), *args)
        rows = step.sample_row_R.tolist()
        assert step.draw_index_R.tolist() == [len(contexts[row]) for row in rows], "noise is keyed on the prefix length"
        if not rows:
            return []
        logits_RV = torch.from_numpy(np.stack([self._language.target(contexts[row]) for row in rows]))
        drawn = self._draw(logits_RV, step)
        assert drawn is not None
        return drawn

    def states(self) -> Tensor | None:
        if self.fuse is None:
            return None
        last = self.steps[-1]
        return torch.stack([last.position_N.float(), last.token_N.float()], dim=1)

    def heartbeat(self, number: int) -> None:
        assert number == len(self.steps)
        self.heartbeats += 1

    def stop(self, number: int) -> None:
        self.stopped = True


class FakeProposer:
    """A `drafter.proposers.base.Proposer` over a language, as an EAGLE head (with features) or a draft model."""

    def __init__(self, language: Language, page_size: int, *, reads_features: bool = False) -> None:
        self.vocab = DraftVocabulary(target_size=language.vocab)
        self._reads_features = reads_features
        self.tree_graphs = None
        self._language = language
        # Requests that share an undrafted page both feed it.
        self.memory = Memory(page_size, may_repeat=not reads_features)

    def extend(self, request: DraftRequest) -> Tensor:
        slot_M = worker_slots(request)
        assert (request.features_MH is not None) == self._reads_features
        if request.features_MH is not None:
            self._take_features(request, slot_M)
        attention = AttentionMetadata(
            query_offsets=request.offsets.numpy(),
            page_table_BP=request.page_table_BP.numpy(),
            base_B=request.start_B.numpy(),
            slot_N=slot_M.numpy(),
            visible_N=slot_M.numpy() + 1,
            ancestors_N=np.zeros(len(slot_M), dtype=np.int64),
        )
        contexts = self.memory.forward(attention, slot_M, request.token_M)
        if request.features_MH is not None:
            told = [int(token) for _, token in request.features_MH.tolist()]
            assert told == [context[-2] for context in contexts], "a feature of another token"
        self._growing = (request.num_nodes_B > 0).nonzero()[:, 0]
        self._pages = request.page_table_BP[self._growing]
        self._base = slot_M[(request.offsets[1:] - 1)[self._growing]]
        roots = (request.offsets[1:] - 1)[self._growing].tolist()
        self._features = None
        if request.features_MH is not None:
            self._features = torch.full((len(roots), 64, 2), torch.nan)
            for g, row in enumerate(roots):
                self._features[g, 0] = torch.tensor([int(slot_M[row]), int(request.token_M[row])])
        return self._logits([contexts[row] for row in roots])

    def expand(self, level: Frontier) -> Tensor:
        request_F = torch.from_numpy(level.request_F)
        counts = np.bincount(level.request_F, minlength=len(self._base))
        base_F = self._base[request_F]
        attention = AttentionMetadata(
            query_offsets=np.concatenate([[0], np.cumsum(counts)]),
            page_table_BP=self._pages.numpy(),
            base_B=self._base.numpy(),
            slot_N=base_F.numpy() + level.row_F,
            visible_N=base_F.numpy(),
            ancestors_N=level.ancestors_F,
        )
        if self._features is not None:
            for g, row, token in zip(level.request_F, level.row_F, level.token_F, strict=True):
                self._features[g, row] = torch.tensor([int(self._base[g]) + level.depth, int(token)])
        return self._logits(self.memory.forward(attention, base_F + level.depth, torch.from_numpy(level.token_F)))

    def _take_features(self, request: DraftRequest, slot_M: Tensor) -> None:
        """Check that f_{j-1} comes with t_j. An EAGLE head gets only the feature of token 0; slot 0 stays empty."""
        assert request.features_MH is not None
        tables = request.page_table_BP.repeat_interleave(request.offsets.diff(), dim=0).tolist()
        for pages, slot, (position, token) in zip(tables, slot_M.tolist(), request.features_MH.tolist(), strict=True):
            assert position == slot - 1, "a feature of another position"
            if slot == 1:
                self.memory.held[self.memory.place(pages, 0)] = (0, int(token))

    def _logits(self, contexts: list[list[int]]) -> Tensor:
        rows = [self._language.draft(context) for context in contexts]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self._language.vocab)


def worker_slots(request: DraftRequest) -> Tensor:
    """Return [M], the slot of each row: request b's rows have slots start_B[b], start_B[b] + 1, ..."""
    ends = request.offsets.tolist()
    starts = request.start_B.tolist()
    slots = [start + i for start, a, b in zip(starts, ends, ends[1:], strict=False) for i in range(b - a)]
    return torch.tensor(slots, dtype=torch.int32)


class FakeChannel:
    """The link to a drafter in this process; both messages are serialized."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._answers: list[Received] = []
        self.requests: list[DraftRequest] = []
        self.replies: list[DraftReply] = []
        self.heartbeats = 0
        self.stopped = False
        self.is_lost = False
        self.dies_with_next_message = False

    def send(self, message: wire.Message, step: int) -> None:
        self._check()
        assert step >= 0
        self.is_lost = self.dies_with_next_message
        assert not self._answers, "the last answer was not read"
        request = over_the_wire(message)
        assert isinstance(request, DraftRequest)
        self.requests.append(request)
        reply = over_the_wire(self.drafter.draft(request))
        assert isinstance(reply, DraftReply)
        if request.is_answered:
            self.replies.append(reply)
            self._answers.append(Received(Kind.DRAFT_REPLY, step, reply))

    def receive(self) -> Received:
        self._check()
        return self._answers.pop()

    def heartbeat(self, step: int) -> None:
        assert step >= 0
        self._check()
        self.heartbeats += 1

    def _check(self) -> None:
        if self.is_lost:
            raise PeerLost("verifier 0 lost drafter 0 at step 9: it closed the link")

    def stop(self, step: int) -> None:
        assert step >= 0
        self.stopped = True


class FakeOffer:
    """The offer of a link, which the next drafter takes when a test says so."""

    def __init__(self) -> None:
        self.address, self.drafter, self.is_closed = "fake", None, False

    def accepted(self) -> FakeChannel | None:
        return self.drafter

    def close(self) -> None:
        self.is_closed = True


def over_the_wire(message: wire.Message) -> wire.Message:
    packed = wire.pack(message)
    return wire.unpack(packed.kind, packed.meta, packed.bulk)


# ---- an engine with a front


@dataclass
class Answer:
    tokens: list[int]
    last: TokenChunk | None = None  # the chunk with the finish reason
    num_chunks: int = 0
    chunks: list[TokenChunk] = field(default_factory=list)


class Bench:
    """An Engine over fakes and its front. The KV cache is checked after every step."""

    def __init__(
        self,
        language: Language,
        method: Literal["eagle3", "draft_model"] | None = None,
        tree: TreeConfig = TreeConfig(),  # noqa: B008
        num_pages: int = 65,
        acceptance: AcceptanceConfig = AcceptanceConfig(),  # noqa: B008
        may_lose_drafter: bool = False,
        has_leaf_siblings: bool = False,
        has_states: bool = False,
        **settings: Any,
    ) -> None:
        draft = None
        if method:
            draft = DraftConfig(method=method, model_path="fake", tree=tree, acceptance=acceptance)
        config = EngineConfig(model_path="fake", draft=draft, **{"page_size": 4, "max_model_len": 256} | settings)
        waiting = None
        if method == "eagle3":
            waiting = HiddenStatePool(max_buffered_states(config), 2, dtype=torch.float32, device=torch.device("cpu"))
        self.states = FakeStates() if has_states or not config.enable_prefix_caching else None
        self.target = FakeTarget(language, config.page_size, config.max_model_len, waiting, self.states)
        self.proposer = FakeProposer(language, config.page_size, reads_features=method == "eagle3")
        is_hybrid = acceptance.sample_method == "hybrid"
        policy = make_tree_policy(tree, has_leaf_siblings=has_leaf_siblings)
        drafter = Drafter(self.proposer, policy, is_hybrid=is_hybrid)
        self._new_drafter = functools.partial(FakeChannel, drafter)
        self.drafter = self._new_drafter() if method else None
        self.offers: list[FakeOffer] = []
        self.losses: list[DrafterLost] = []
        engine_end, self.front = socket.socketpair()
        self.front.setblocking(False)
        self.engine = Engine(
            config,
            self.target,
            self.drafter,  # type: ignore[arg-type]
            FrameSocket(engine_end),
            num_pages,
            offer_link=self._offer if may_lose_drafter else None,  # type: ignore[arg-type]
        )
        self._allocator = self.engine._allocator
        self._free_pages, self._alloc_pages = self._allocator.free, self._allocator.alloc
        self._allocator.free = self._free_and_wipe  # type: ignore[method-assign]
        self._allocator.alloc = self._alloc_and_wipe  # type: ignore[method-assign]
        self._decoder = FrameDecoder()
        self.frames: list[StepOutput] = []
        self.answers: dict[int, Answer] = {}
        self.open: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.front.close()
        self.engine._front.close()

    def submit(self, prompt: list[int], max_tokens: int, params: SamplingSettings | None = None, **more: Any) -> int:
        id = len(self.answers)
        self.front.sendall(
            encode(Submit(id=id, prompt=prompt, max_tokens=max_tokens, sampling=params or SamplingSettings(), **more))
        )
        self.answers[id] = Answer([])
        self.open.add(id)
        return id

    def abort(self, id: int) -> None:
        self.front.sendall(encode(Abort(id=id)))
        self.open.discard(id)

    def lose_drafter(self, *, with_next_message: bool = False) -> None:
        """Kill the drafter, now or between its next message and the reply."""
        assert self.drafter is not None
        self.drafter.is_lost, self.drafter.dies_with_next_message = not with_next_message, with_next_message

    def replace_drafter(self) -> None:
        """Connect a new drafter, whose memory is empty, to the engine's offer."""
        self.proposer.memory.held.clear()
        self.drafter = self.offers[-1].drafter = self._new_drafter()

    def _offer(self) -> FakeOffer:
        self.offers.append(FakeOffer())
        return self.offers[-1]

    def step(self) -> None:
        self.engine.step()
        self._read()
        running = self.engine._running
        holders = Counter(page for request in running for page in request.pages)
        counted = {page: n for page in range(self._allocator.num_pages) if (n := self._allocator.num_holders(page))}
        assert counted == holders, "whose page is it?"
        assert len(holders) + self.num_free == self._allocator.num_pages - 1
        assert not any(request.pages or request.seat for request in self.engine._waiting)
        seats = [request.seat for request in running]
        assert sorted(seats + self.engine._free_seats) == list(range(1, 1 + self.engine._config.max_num_seqs))
        written = [page for request in running for page in request.pages[self._first_written(request) :]]
        assert len(set(written)) == len(written), "two requests write one page"
        if (waiting := self.target.state_pool) is not None:
            rows = [row for request in running for row in self.engine._hidden_states.rows_of(request)]
            assert len(set(rows)) == len(rows), "two requests share a row of the pool"
            assert len(rows) + waiting.num_free == max_buffered_states(self.engine._config)
            assert not any(self.engine._hidden_states.rows_of(request) for request in self.engine._waiting)
        for request in running:
            self._check(request)

    def run(self) -> None:
        for _ in range(5000):
            if not self.open:
                return
            self.step()
        raise AssertionError("requests that never finish")

    def ask(self, prompt: list[int], max_tokens: int, params: SamplingSettings | None = None, **more: Any) -> Answer:
        """Run a single request to its end."""
        id = self.submit(prompt, max_tokens, params, **more)
        self.run()
        return self.answers[id]

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def _free_and_wipe(self, pages: list[int]) -> None:
        """Overwrite freed pages that are not published, so that stale content is never read."""
        self._free_pages(pages)
        self._wipe([p for p in pages if not self._allocator.num_holders(p) and not self._allocator.is_published(p)])

    def _alloc_and_wipe(self, count: int) -> list[int]:
        pages = self._alloc_pages(count)
        self._wipe(pages)
        return pages

    def _wipe(self, pages: list[int]) -> None:
        self.target.memory.wipe(pages)
        self.proposer.memory.wipe(pages)

    def _first_written(self, request: Request) -> int:
        """Return the index of the first page that the next steps may write in either pool."""
        moved = [move.target for move in self.engine._moves if move.request is request]
        # A drafter without features is fed shared pages by each of their holders, with the same tokens.
        fed = [request.num_fed] if request.has_drafter and request.reads_features else []
        return min([request.num_computed, *moved, *fed]) // self.engine._config.page_size

    def _read(self) -> None:
        try:
            data = self.front.recv(1 << 20)
        except BlockingIOError:
            return
        for frame in self._decoder.feed(data):
            if isinstance(frame, DrafterLost):
                self.losses.append(frame)
                continue
            assert isinstance(frame, StepOutput)
            self.frames.append(frame)
            for chunk in frame.chunks:
                answer = self.answers[chunk.id]
                assert answer.last is None, "nothing follows the last chunk"
                answer.tokens += chunk.tokens
                answer.num_chunks += 1
                answer.chunks.append(chunk)
                if chunk.finish_reason:
                    answer.last = chunk
                    self.open.discard(chunk.id)

    def _check(self, request: Request) -> None:
        """Check that slots 0 .. num_computed - 1 hold the committed tokens after pending moves, also in the drafter."""
        if request.is_decoding:
            assert request.num_computed == len(request.tokens) - 1
        held, place = self.target.memory.held, functools.partial(self.target.memory.place, request.pages)
        view = {slot: held[place(slot)] for slot in range(request.num_computed) if place(slot) in held}
        moves = [move for move in self.engine._moves if move.request is request]
        view |= {move.target: held[place(move.source)] for move in moves}
        wanted = {slot: (slot, request.tokens[slot]) for slot in range(request.num_computed)}
        assert view == wanted, "the target's memory is wrong"
        if self.engine._drafter is not None and request.has_drafter:
            mine = self.proposer.memory.held
            for slot in range(request.first_draft_slot, request.num_fed):
                assert mine[place(slot)] == (slot, request.tokens[slot]), "the drafter's memory is wrong"


# ---- real processes for the channel


def in_processes(
    body: Callable[[World], str], config: EngineConfig, seconds: float = 60.0
) -> Iterator[tuple[int, str]]:
    """Run body(world) on every rank of an engine's world in separate processes; yield (rank, result) as they finish.

    A rank that dies yields nothing.
    """
    context: Any = forked.context()
    store, address = groups.open_store()
    queue = context.Queue()
    processes = [
        context.Process(target=_rank, args=(body, config.to_json(), rank, address, queue), daemon=True)
        for rank in range(config.world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            alive = any(process.is_alive() for process in processes)
            try:
                yield queue.get(timeout=0.1)
            except queues.Empty:
                if not alive:
                    return
        raise AssertionError("ranks that never finish")
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _rank(body: Callable[[World], str], config: str, rank: int, address: str, queue: Any) -> None:
    torch.set_num_threads(1)
    try:
        world = groups.join(EngineConfig.from_json(config), rank, address)
        queue.put((rank, body(world)))
        queue.close()
        queue.join_thread()
    except BaseException:
        queue.put((rank, traceback.format_exc()))
