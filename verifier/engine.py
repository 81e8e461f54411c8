"""The engine loop, on verifier rank 0: take -> schedule -> draft -> verify -> commit -> emit.

It owns every request's state and the page table that indexes the target's and the drafter's KV pools alike. Requests
join and leave between steps. Nothing here blocks but the drafter's answer and the target's forward.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from verifier.acceptance.coupled import verify
from verifier.adaptive.controller import Controller, Exchange, Plan, StepOutcome
from verifier.adaptive.cost_model import UNPROFILED, RowCosts
from verifier.admission import rejection_reason, request_of
from verifier.draft_batch import DraftBatch
from verifier.hidden_states import HiddenStateBuffer
from verifier.prefix_cache import PrefixCache
from verifier.request import Request
from verifier.scheduler import Limits, Step, schedule
from verifier.step_inputs import Move, pack_draft, pack_target
from verifier.target import Target
from verifier.tree import with_chains
from workers.comm.channel import Channel
from workers.comm.ipc import Abort, EngineStats, FrameSocket, StepOutput, Submit, TokenChunk
from workers.comm.wire import Kind
from workers.config import EngineConfig
from workers.kv_cache import PageAllocator
from workers.types import DraftReply, SamplingBatch, Verdict

HEARTBEAT_S = 1.0
"""While idle, peers and the front hear from the engine this often, so that silence means death."""


class _NewTokens(NamedTuple):
    """What one request gained in one step: of the verdict's tokens those up to the answer's end."""

    tokens: list[int]
    num_accepted: int  # of these the leading ones, which its tree had
    finish_reason: str | None
    stop_token: int | None


class Engine:
    """Runs steps until its front disconnects.

    drafter: the link to drafter rank 0, or None when nothing is drafted. num_pages counts the null page. row_costs:
    what the target was seen to take, for `auto`.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        drafter: Channel | None,
        front: FrameSocket,
        num_pages: int,
        row_costs: RowCosts = UNPROFILED,
    ) -> None:
        self._config = config
        self._target = target
        self._drafter = drafter
        self._front = front
        self._allocator = PageAllocator(num_pages)
        self._prefixes = PrefixCache(
            self._allocator, config.page_size, target.waiting, is_enabled=config.enable_prefix_caching
        )
        self._owed = HiddenStateBuffer(target.waiting, self._prefixes.keep_states)
        self._controller = Controller(config, row_costs)
        self._limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            page_size=config.page_size,
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._moves: list[Move] = []  # accepted paths to compact before the next forward
        self._chunks: list[TokenChunk] = []  # what this step tells the front
        self._stats = EngineStats()
        self._last_sign = 0.0  # when the front last heard from us
        self._last_draft = 0.0  # when the drafter did

    def run(self) -> None:
        """Steps until the front is gone. Raises FrontGone then, PeerLost when a rank is."""
        while True:
            self.step()

    def step(self) -> None:
        self._take()
        step = schedule(self._waiting, self._running, self._allocator.num_free, self._limits, self._prefixes.find)
        if step.is_empty:
            return self._emit()
        began = time.perf_counter()
        self._make_room(step)
        plan = self._controller.plan(step, self._running)
        drafts, exchange = self._draft(step, plan)
        verdicts = self._verify(step, drafts)
        self._commit(step, drafts, verdicts)
        seconds = time.perf_counter() - began
        self._controller.observe(plan, StepOutcome(step, drafts, verdicts, exchange, 1e3 * seconds))
        self._stats.steps += 1
        self._stats.step_seconds += seconds
        self._emit()

    def stop(self) -> None:
        """Tells every other rank to leave."""
        self._target.stop(self._stats.steps)
        if self._drafter is not None:
            self._drafter.stop(self._stats.steps)

    def _take(self) -> None:
        """Reads the front's messages; when there is nothing to do, waits for one, with a heartbeat to all."""
        idle = not self._waiting and not self._running
        for message in self._front.poll(HEARTBEAT_S if idle else 0.0):
            match message:
                case Submit():
                    self._submit(message)
                case Abort(id=id):
                    self._abort(id)
        if idle and time.monotonic() - self._last_sign >= HEARTBEAT_S:
            self._target.heartbeat(self._stats.steps)
        if self._drafter is not None and time.monotonic() - self._last_draft >= HEARTBEAT_S:
            self._drafter.heartbeat(self._stats.steps)
            self._last_draft = time.monotonic()

    def _submit(self, submit: Submit) -> None:
        request = request_of(submit, self._config)
        problem = rejection_reason(request, self._config.max_model_len, self._limits, self._allocator.num_pages - 1)
        if problem is None:
            self._waiting.append(request)
        else:
            self._chunks.append(TokenChunk(id=submit.id, tokens=[], finish_reason="error", error=problem))

    def _abort(self, id: int) -> None:
        for request in [r for r in (*self._waiting, *self._running) if r.id == id]:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        self._publish([request])
        self._moves = [move for move in self._moves if move.request is not request]
        self._allocator.free(request.pages)
        self._owed.free(request)
        request.forget()

    def preempt(self, request: Request) -> None:
        """Takes a running request's pages and seat; first in line, it computes again what was not kept when it rejoins.
        Its tokens stay, so that it goes on as if nothing had happened. Between steps only."""
        self._release(request)
        self._waiting.appendleft(request)
        self._stats.num_preemptions += 1

    def _make_room(self, step: Step) -> None:
        for request in step.preempted:
            self.preempt(request)
        if step.shared:
            self._owed.settle()
        for request, pages in step.shared:
            self._waiting.remove(request)
            self._running.append(request)
            self._prefixes.adopt(request, pages)
            if request.num_cached is None:  # preemption asks again, but that is no prompt's luck
                request.num_cached = request.num_computed
                self._stats.prefix_cache_queries += request.num_prompt * self._config.enable_prefix_caching
                self._stats.prefix_cache_hits += request.num_cached
        for request, count in step.pages:
            request.pages.extend(self._allocator.alloc(count))

    def _draft(self, step: Step, plan: Plan) -> tuple[DraftBatch, Exchange | None]:
        """The trees of all decoding requests: the drafter's, lookup drafts, and bare roots."""
        exchange = self._exchange(plan) if plan.inputs else None
        drafted = [plan.is_drafted(request) for request in step.decode]
        chains = [[request.tokens[-1], *plan.lookup_drafts.get(request, ())] for request in step.decode]
        return DraftBatch.of(exchange.reply if exchange else None, drafted, chains), exchange

    def _exchange(self, plan: Plan) -> Exchange:
        """Feeds the drafter what was committed since it last heard of each request, and gets its trees."""
        assert self._drafter is not None
        began = time.perf_counter()
        self._owed.settle()
        fed = [row for request, own in plan.inputs.items() for row in request.states[: len(own.tokens)]]
        features_MH = self._target.features(fed)
        assert features_MH is None or len(fed) == sum(len(own.tokens) for own in plan.inputs.values())
        message = pack_draft(plan.inputs, features_MH, self._config.eos_token_ids, plan.costs)
        self._drafter.send(message, self._stats.steps)
        for request, own in plan.inputs.items():
            request.num_fed += len(own.tokens)
            del request.states[: len(own.tokens)]
        received = self._drafter.receive()
        assert received.kind == Kind.DRAFT_REPLY and isinstance(received.message, DraftReply)
        reply = received.message
        self._last_draft = time.monotonic()
        seconds = time.perf_counter() - began
        self._stats.draft_seconds += reply.seconds
        self._stats.transfer_seconds += seconds - reply.seconds
        return Exchange(reply, 1e3 * seconds)

    def _verify(self, step: Step, drafts: DraftBatch) -> list[Verdict]:
        """The verdicts on all trees, then on every prompt that is now complete: a root without a tree."""
        began = time.perf_counter()
        packed = pack_target(
            drafts.trees, step.decode, step.prefill, self._moves, self._config.page_size, self._config.eos_token_ids
        )
        self._moves = []
        packed_at = time.perf_counter()
        drawn = self._target.run(packed, self._stats.steps)
        drawn_at = time.perf_counter()
        finishing = [request for request, _ in step.finishing]
        trees, probs = drafts.trees, drafts.probs
        if finishing:
            drafted = [True] * len(step.decode) + [False] * len(finishing)
            trees, probs = with_chains(trees, probs, drafted, [r.tokens[-1:] for r in step.decode + finishing])
        requests = step.decode + finishing
        verdicts = verify(
            trees,
            probs,
            drawn,
            rules=[r.rule for r in requests],
            params=lambda own: SamplingBatch.stack([requests[i].submit.sampling for i in own]),
            root_position_B=[len(r.tokens) - 1 for r in requests],
            processed=self._target.processed,
        )
        judged_at = time.perf_counter()
        self._stats.verify_seconds += judged_at - began
        self._stats.forward_seconds += drawn_at - packed_at
        self._stats.accept_seconds += judged_at - drawn_at
        return verdicts

    def _commit(self, step: Step, drafts: DraftBatch, verdicts: list[Verdict]) -> None:
        """Applies the verdicts: KV moves of accepted paths, states for the drafter, tokens, finished requests."""
        computed = self._advance(step, drafts, verdicts)
        finishing = [request for request, _ in step.finishing]
        said = [self._said(r, verdict) for r, verdict in zip(step.decode + finishing, verdicts, strict=True)]
        self._count(step, drafts, said)
        self._owe_states(computed)
        num_decode, num_tree_rows = len(step.decode), len(drafts.trees.token_N)
        for row, (request, own) in enumerate(zip(finishing, said[num_decode:], strict=True), start=num_tree_rows):
            self._stats.prompt_tokens += request.num_prompt
            self._append(request, own, [row], is_copied=False)
        for (request, rows), own, is_copied in zip(
            computed[len(step.prefill) :], said[:num_decode], drafts.copied, strict=True
        ):
            self._append(request, own, rows, is_copied=is_copied)
        self._publish(self._running)

    def _advance(self, step: Step, drafts: DraftBatch, verdicts: list[Verdict]) -> list[tuple[Request, list[int]]]:
        """Each request's new positions, as rows of the step: prompts' chunks, then roots with their accepted paths."""
        begins = drafts.trees.offsets.tolist()
        computed, row = [], begins[-1]
        for request, chunk in step.prefill:
            computed.append((request, list(range(row, row + chunk.stop - chunk.start))))
            row += chunk.stop - chunk.start
            request.num_computed = chunk.stop
        for i, (request, begin, verdict) in enumerate(zip(step.decode, begins, verdicts, strict=False)):
            root = len(request.tokens) - 1
            computed.append((request, [begin, *(begin + row for row in verdict.path)]))
            self._moves += [
                Move(request, root + row, root + 1 + i) for i, row in enumerate(verdict.path) if row != i + 1
            ]
            request.num_computed = root + len(verdict.tokens)
        return computed

    def _said(self, request: Request, verdict: Verdict) -> _NewTokens:
        """The verdict's tokens up to a stop token or the length limit."""
        submit, kept, reason, stop_token = request.submit, [], None, None
        for token in verdict.tokens:
            kept.append(token)
            is_eos = token in self._config.eos_token_ids and not submit.ignore_eos
            if is_eos or token in submit.stop_token_ids:
                reason, stop_token = "stop", token
            elif request.num_output + len(kept) == submit.max_tokens:
                reason = "length"
            if reason:
                break
        return _NewTokens(kept, min(len(verdict.path), len(kept)), reason, stop_token)

    def _count(self, step: Step, drafts: DraftBatch, said: list[_NewTokens]) -> None:
        """What became of every drafted node, for the service and for the request. A node accepted behind the answer's
        end is verified, not accepted: nobody gets it."""
        for i, (request, own) in enumerate(zip(step.decode, said, strict=False)):
            verified, pruned = drafts.verified[i], drafts.pruned[i]
            if not (verified or pruned):
                continue
            for stats in (request.stats, self._stats):
                stats.num_drafts += any(verified)
                stats.count_nodes(pruned, verified, own.num_accepted)
                if drafts.copied[i]:
                    stats.num_copied_tokens += sum(verified)
                    stats.num_accepted_copied_tokens += own.num_accepted

    def _owe_states(self, computed: list[tuple[Request, list[int]]]) -> None:
        """To the drafter, by all that it may ever draft for."""
        if any(request.limits is not None for request, _ in computed):
            state_NX = self._target.states()
            if state_NX is not None:
                self._owed.add(computed, state_NX)

    def _publish(self, requests: list[Request]) -> None:
        """Lets others share what these hold, but no slot that still waits for a move."""
        settled: dict[Request, int] = {}
        for move in self._moves:
            settled[move.request] = min(move.target, settled.get(move.request, move.target))
        for request in requests:
            self._prefixes.publish(request, settled.get(request, request.num_computed))

    def _append(self, request: Request, said: _NewTokens, rows: list[int], *, is_copied: bool) -> None:
        """Commits tokens, drawn at these sampled rows; releases a finished request."""
        kept, asked = said.tokens, request.submit.sampling.num_logprobs
        request.append(kept)
        self._stats.generation_tokens += len(kept)
        if said.finish_reason:
            self._stats.requests_finished += 1
            self._release(request)
        self._chunks.append(
            TokenChunk(
                id=request.id,
                tokens=kept,
                finish_reason=said.finish_reason,
                stop_token=said.stop_token,
                logprobs=None if asked is None else self._target.logprobs(rows[: len(kept)], kept, asked),
                num_cached_tokens=request.num_cached or 0,
                num_accepted=said.num_accepted,
                is_copied=is_copied,
                stats=request.stats,
            )
        )

    def _emit(self) -> None:
        """One frame with everything this step has to tell; while idle, a sign of life each heartbeat."""
        now = time.monotonic()
        if not self._chunks and now - self._last_sign < HEARTBEAT_S:
            return
        self._stats.num_running, self._stats.num_waiting = len(self._running), len(self._waiting)
        self._stats.kv_usage = 1 - self._allocator.num_free / (self._allocator.num_pages - 1)
        self._front.send(StepOutput(chunks=self._chunks, stats=self._stats))
        self._chunks, self._last_sign = [], now
