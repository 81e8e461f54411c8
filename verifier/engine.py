"""The engine loop, on verifier rank 0: take -> schedule -> draft -> verify -> commit, and emit.

The engine owns every request's state, and the page allocator for the target's and the drafter's KV pools. Requests join
and leave between steps. Only the drafter's reply and the target's forward block the loop, and while it waits for them
it does what no other rank waits for: a step's tokens are emitted while the next one's drafts grow. An engine that may
lose its drafter goes on without drafts until a new one connects.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest
from operator import attrgetter

from verifier.acceptance.coupled import verify, walk
from verifier.adaptive.controller import Controller, Exchange, Plan, StepOutcome
from verifier.adaptive.cost_model import UNPROFILED, RowCosts, TimedExchange
from verifier.admission import rejection_reason, request_of
from verifier.draft_batch import DraftBatch
from verifier.drafter_peer import DrafterPeer
from verifier.drafting import Drafting
from verifier.head_acceptance import HeadAcceptance
from verifier.head_swap import HeadSwap, LoadFuse
from verifier.hidden_states import HiddenStateBuffer
from verifier.prefix_cache import PrefixCache
from verifier.request import NewTokens, Request
from verifier.scheduler import Limits, Step, schedule
from verifier.step_inputs import Fold, Move, StepInputs
from verifier.target import Target
from verifier.tree import with_chains
from verifier.tree_records import StepTimes, tree_records
from workers.comm.channel import Channel, ChannelOffer
from workers.comm.ipc import (
    Abort,
    DrafterLost,
    EngineStats,
    FrameSocket,
    FrontGone,
    HeadSwapped,
    StepOutput,
    Submit,
    SwapHead,
    TokenChunk,
    TokenLogprobs,
    TreeRecord,
)
from workers.config import EngineConfig
from workers.kv_cache import Checkpoints, PageAllocator
from workers.pulse import PULSE
from workers.settings import HeadAction
from workers.types import SamplingBatch, Verdict, as_text

GRAMMAR_FAILED = "grammar_failed"
"""Error code of a request whose output could not follow its grammar."""
HEARTBEAT_S = 1.0
"""While idle, the engine sends a heartbeat this often. A peer that stays silent for longer is dead."""
LEARNT = 0
"""The id of swaps that no front asked for."""
HEAD_POLL_S = 0.02
"""While idle, the engine asks this often whether another head is loaded."""

_ORDER = attrgetter("order")


class Engine:
    """Runs steps until its front disconnects.

    drafter: the link to drafter rank 0, or None without a drafter. num_pages: includes the null page. row_costs: the
    start-up profile of the target, for `auto`. offer_link: opens the link on which a lost drafter's successor connects;
    None = the loss of the drafter ends the engine. load_fuse: see `HeadSwap`. exchanges: the start-up profile of
    drafting.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        drafter: Channel | None,
        front: FrameSocket,
        num_pages: int,
        row_costs: RowCosts = UNPROFILED,
        offer_link: Callable[[], ChannelOffer] | None = None,
        load_fuse: LoadFuse | None = None,
        exchanges: Sequence[TimedExchange] = (),
    ) -> None:
        self._config = config
        self._target = target
        self._drafter = DrafterPeer(drafter, offer_link, self._drafter_lost)
        self._heads = HeadSwap(self._drafter, target, load_fuse)
        self._front = front
        self._allocator = PageAllocator(num_pages)
        seats = range(1 + config.max_num_seqs, 1 + config.num_seats)
        self._prefix_cache = PrefixCache(
            self._allocator,
            config.page_size,
            is_enabled=config.enable_prefix_caching,
            checkpoints=Checkpoints(seats) if target.has_states else None,
        )
        self._hidden_states = HiddenStateBuffer(target.state_pool, self._prefix_cache.keep_states)
        learns = config.draft is not None and bool(config.draft.learning_path)
        self._inputs = StepInputs(config.page_size, config.eos_token_ids, has_states=target.has_states, learns=learns)
        self._controller = Controller(config, row_costs, self._count_allowed, exchanges)
        self._limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            page_size=config.page_size,
        )
        self._waiting: list[Request] = []  # by `Request.order`, as the next one
        self._running: list[Request] = []
        self._free_seats = list(range(config.max_num_seqs, 0, -1))
        self._moves: list[Move] = []  # accepted paths to compact before the next forward
        self._folds: list[Fold] = []  # accepted rows that recurrent states take in before the next forward
        self._chunks: list[TokenChunk] = []  # for the front
        self._head_path = "" if config.draft is None else config.draft.model_path
        self._head_acceptance = HeadAcceptance(self._head_path)
        self._stats = EngineStats()
        self._drafting = Drafting(self._controller, self._drafter, target, self._hidden_states, self._inputs)
        self._last_emit = 0.0  # when the last frame was sent to the front
        self._front_gone: FrontGone | None = None

    def run(self) -> None:
        """Run steps forever. Raise FrontGone when the front disconnects, and PeerLost when a rank is lost."""
        while True:
            self._step()
            PULSE.advance()

    def step(self) -> None:
        """Run one step to its end, for callers that look at the engine between steps."""
        self._step()
        self._catch_up()

    def _step(self) -> None:
        """Run one step, or only send what is to be sent if there is nothing to compute.

        The last part of a step, `_catch_up`, is left to the next one unless no request remains.
        """
        if self._front_gone is not None:
            raise self._front_gone
        self._take()
        if self._front.is_behind:
            return
        free_pages, find = self._allocator.num_free, self._prefix_cache.find
        step = schedule(self._waiting, self._running, free_pages, self._limits, find, self._controller.auto_rows)
        self._stats.lacks_pages = step.lacks_pages
        if step.is_empty:
            return self._catch_up()
        began = time.perf_counter()
        self._make_room(step)
        plan, drafts, exchange = self._drafting.draft(step, self._stats.steps, self._running, self._catch_up)
        drafted_at = time.perf_counter()
        if exchange is not None:
            self._count_exchange(plan, exchange)
        verdicts = self._verify(step, drafts)
        times = StepTimes(exchange.ms if exchange else None, 1e3 * (time.perf_counter() - drafted_at))
        self._commit(step, drafts, verdicts, tree_records(step, drafts, verdicts, times))
        ended = time.perf_counter()
        seconds = ended - began
        self._controller.observe(plan, StepOutcome(step, drafts, verdicts, exchange, 1e3 * seconds))
        self._stats.steps += 1
        self._stats.step_seconds += seconds
        if not (self._running or self._waiting):
            self._catch_up()

    def _catch_up(self) -> None:
        """Send the last step's tokens, for which no other rank waits.

        Other ranks may be in the middle of a step. So the loss of the front is an error of the next one.
        """
        try:
            self._emit()
        except FrontGone as error:
            self._front_gone = error

    def stop(self) -> None:
        """Tell every other rank to leave."""
        self._target.stop(self._stats.steps)
        self._drafter.stop(self._stats.steps)

    def _take(self) -> None:
        """Read the front's messages. Without requests, or room for their tokens, wait for one and send heartbeats."""
        self._drafter.accept_successor()
        idle = self._front.is_behind or not (self._waiting or self._running)
        wait_s = HEAD_POLL_S if self._heads.is_under_way else HEARTBEAT_S
        for message in self._front.poll(wait_s if idle else 0.0):
            match message:
                case Submit():
                    self._submit(message)
                case Abort(id=id):
                    self._abort(id)
                case SwapHead():
                    self._report_swap(self._heads.begin(message, self._stats.steps))
        self._report_swap(self._heads.advance(self._stats.steps))
        if idle and time.monotonic() - self._last_emit >= HEARTBEAT_S:
            self._target.heartbeat(self._stats.steps)
        self._drafter.keep_alive(self._stats.steps, HEARTBEAT_S)

    def _drafter_lost(self, message: DrafterLost) -> None:
        """Go on without drafts. Nothing is drafted any more for requests that are here now.

        A successor's KV cache is empty, and the features that would fill it for these requests were not kept.
        """
        self._stats.num_drafter_losses += 1
        self._target.candidate = None
        self._allocator.forget_drafter()
        for request in (*self._waiting, *self._running):
            self._drop_drafter_of(request)
        self._front.send(message)

    def _report_swap(self, ended: HeadSwapped | None) -> None:
        """Tell the front of a swap's end. Running requests go on with the keys and values of both heads.

        No token depends on these, and most of them are equal or alike. Later requests do not share those of the old
        head, because a prefix that many of them have would keep it for ever.
        """
        if ended is None:
            return
        if ended.action != HeadAction.TAKE:
            return self._front.send(ended)
        self._head_acceptance.report(self._stats)
        trees, accepted = self._stats.num_head_trees, self._stats.num_head_accepted_tokens
        ended = replace(ended, old_path=self._head_path, num_old_trees=trees, num_old_accepted_tokens=accepted)
        if ended.error is None:
            self._allocator.forget_drafter()
            self._controller.forget_trees()
            self._stats.num_head_swaps += 1
            self._head_path, self._head_acceptance = ended.path, HeadAcceptance(ended.path)
        self._front.send(ended)

    def _drop_drafter_of(self, request: Request) -> None:
        request.has_drafter = False
        self._hidden_states.free(request)

    def _submit(self, submit: Submit) -> None:
        request = request_of(submit, self._config)
        if not self._drafter.is_connected:
            self._drop_drafter_of(request)
        reason = rejection_reason(request, self._config.max_model_len, self._limits, self._allocator.num_pages - 1)
        code = None
        if reason is None and request.has_grammar:
            grammars, code = self._target.grammars, GRAMMAR_FAILED
            reason = "no tokenizer" if grammars is None else grammars.problem(submit.sampling.constraints.grammar)
        if reason is None:
            insort(self._waiting, request, key=_ORDER)
        else:
            self._fail(request, reason, code)

    def _fail(self, request: Request, error: str, code: str | None) -> None:
        chunk = TokenChunk(id=request.id, tokens=[], finish_reason="error", error=error, error_code=code)
        self._chunks.append(chunk)

    def _abort(self, id: int) -> None:
        for request in [r for r in (*self._waiting, *self._running) if r.id == id]:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._free_seats.append(request.seat)
        self._publish([request])
        self._moves = [move for move in self._moves if move.request is not request]
        self._folds = [fold for fold in self._folds if fold.request is not request]
        self._allocator.free(request.pages)
        self._prefix_cache.release(request)
        self._hidden_states.free(request)
        if request.has_grammar and self._target.grammars is not None:
            self._target.grammars.drop(request.id)
        request.forget()

    def preempt(self, request: Request) -> None:
        """Return a running request to its place in the queue and release its pages. Call it between steps only.

        Its tokens stay. When it rejoins, the KV that the prefix cache has lost is recomputed, and decoding goes on.
        """
        self._release(request)
        insort(self._waiting, request, key=_ORDER)
        self._stats.num_preemptions += 1

    def _make_room(self, step: Step) -> None:
        """Preempt requests, let others join, and allocate pages, as scheduled."""
        for request in step.preempted:
            self.preempt(request)
        if step.shared:
            self._hidden_states.flush()
        for request, pages in step.shared:
            self._join(request, pages)
        for request, count in step.pages:
            request.pages.extend(self._allocator.alloc(count))

    def _join(self, request: Request, pages: list[int]) -> None:
        """Give a waiting request its seat and the pages that hold the beginning of its tokens."""
        self._waiting.remove(request)
        insort(self._running, request, key=_ORDER)
        request.seat, request.read_seat = self._free_seats.pop(), self._prefix_cache.resume(request, pages)
        if pages:
            request.share(pages, self._config.page_size, self._prefix_cache.share(request, pages))
            state_1X = self._prefix_cache.last_state(pages)
            if state_1X is not None and request.has_drafter:
                self._hidden_states.put(request, state_1X)
        if request.num_cached is None:  # a request that rejoins after a preemption is not counted again
            request.num_cached = request.num_computed
            request.queued_s = time.perf_counter() - request.arrived_s
            self._stats.prefix_cache_queries += request.num_prompt * self._config.enable_prefix_caching
            self._stats.prefix_cache_hits += request.num_cached

    def _verify(self, step: Step, drafts: DraftBatch) -> list[Verdict]:
        """Return the verdicts on all trees, then one for each completed prompt, which is a root without a tree."""
        began = time.perf_counter()
        spans = [
            *((request, request.num_computed - len(rows), request.num_computed) for request, rows in self._folds),
            *((request, chunk.start, chunk.stop) for request, chunk in step.prefill),
        ]
        keeps = self._prefix_cache.keeps(spans)
        target_step = self._inputs.target_step(drafts.trees, step.decode, step.prefill, self._moves, self._folds, keeps)
        self._moves, self._folds = [], []
        packed_at = time.perf_counter()
        drawn = self._target.run(target_step, self._stats.steps, while_waiting=self._catch_up)
        drawn_at = time.perf_counter()
        if target_step.scored is not None:
            self._report_scores(step, self._target.scores())
        verdicts = self._verdicts(step, drafts, drawn, has_sampled=target_step.has_sampled)
        verified_at = time.perf_counter()
        self._stats.verify_seconds += verified_at - began
        self._stats.forward_seconds += drawn_at - packed_at
        self._stats.accept_seconds += verified_at - drawn_at
        return verdicts

    def _verdicts(self, step: Step, drafts: DraftBatch, drawn: list[int], *, has_sampled: bool) -> list[Verdict]:
        """Verify the trees, given the target's own draws. has_sampled: some request's drafts are sampled."""
        finishing = [request for request, _ in step.finishing]
        requests = step.decode + finishing
        trees, probs = drafts.trees, drafts.probs
        if finishing:
            drafted = [True] * len(step.decode) + [False] * len(finishing)
            trees, probs = with_chains(trees, probs, drafted, [request.tokens[-1:] for request in requests])
        if not has_sampled:
            return walk(trees, drawn)
        return verify(
            trees,
            probs,
            drawn,
            rules=[request.rule for request in requests],
            params=lambda own: SamplingBatch.stack([requests[i].submit.sampling for i in own]),
            root_position_B=[len(request.tokens) - 1 for request in requests],
            processed=self._target.processed,
        )

    def _report_scores(self, step: Step, scores: list[TokenLogprobs]) -> None:
        """Send the log-probabilities of the step's prompt tokens; `scores` are those of all its chunks, in order."""
        for request, chunk in step.prefill:
            if positions := request.to_score(chunk.start, chunk.stop):
                own, scores = scores[: len(positions)], scores[len(positions) :]
                request.num_scored = positions.stop
                self._chunks.append(TokenChunk(id=request.id, tokens=[], prompt_logprobs=own))

    def _commit(
        self, step: Step, drafts: DraftBatch, verdicts: list[Verdict], records: Mapping[Request, TreeRecord]
    ) -> None:
        """Apply the verdicts: KV moves of accepted paths, states for the drafter, new tokens, finished requests."""
        self._advance(step, verdicts)
        if self._target.has_states:  # every decoding request goes on from its root, even if no draft was accepted
            rows = zip(step.decode, drafts.trees.offsets.tolist(), verdicts, strict=False)
            self._folds = [Fold(request, _rows(begin, verdict.path)) for request, begin, verdict in rows]
        self._buffer_states(step, drafts, verdicts)
        finishing = [request for request, _ in step.finishing]
        requests, begins = step.decode + finishing, drafts.trees.offsets.tolist()
        new = [request.new_tokens(verdict) for request, verdict in zip(requests, verdicts, strict=True)]
        self._count(step, drafts, verdicts, new)
        self._stats.prompt_tokens += sum(request.num_prompt for request in finishing)
        begins += range(begins[-1] + 1, begins[-1] + len(finishing))  # a completed prompt has one sampled row
        copied = drafts.copied + [False] * len(finishing)
        for request, own, begin, is_copied in zip(requests, new, begins, copied, strict=False):
            self._append(request, own, begin, is_copied=is_copied, tree=records.get(request))
        self._publish(self._running)

    def _advance(self, step: Step, verdicts: list[Verdict]) -> None:
        """Count the computed positions: of prompt chunks, roots and accepted paths, some of whose KV is yet to move."""
        for request, chunk in step.prefill:
            request.num_computed, request.read_seat = chunk.stop, request.seat
        for request, verdict in zip(step.decode, verdicts, strict=False):
            root = request.num_computed  # of a decoding request
            request.num_computed += len(verdict.tokens)
            if verdict.path:
                self._moves += [
                    Move(request, root + row, root + i) for i, row in enumerate(verdict.path, start=1) if row != i
                ]

    def _count_exchange(self, plan: Plan, exchange: Exchange) -> None:
        for request, own in plan.inputs.items():
            request.num_fed += len(own.tokens)
        self._stats.transfer_seconds += exchange.ms / 1e3
        if (reply := exchange.reply) is None:
            return
        self._stats.draft_seconds += reply.seconds
        self._stats.transfer_seconds -= reply.seconds
        self._stats.num_trees += len(reply.pruned_GD)
        if reply.learnt_U is not None:
            learnt = SwapHead(id=LEARNT, path=as_text(reply.learnt_U))
            self._report_swap(self._heads.begin(learnt, self._stats.steps))

    def _count(self, step: Step, drafts: DraftBatch, verdicts: list[Verdict], new: list[NewTokens]) -> None:
        """Count verified, accepted and pruned nodes for the engine and for each request.

        A node that was accepted behind the end of the output counts as verified only.
        """
        if not (drafts.num_nodes or any(drafts.pruned)):
            return
        num_accepted = [own.num_accepted for own in new[: len(step.decode)]]
        rows = zip(step.decode, drafts.pruned, drafts.verified, num_accepted, drafts.copied, strict=True)
        for request, pruned, verified, accepted, is_copied in rows:
            request.stats.num_drafts += bool(verified)
            request.stats.count_nodes(pruned, verified, accepted)
            for stats in (request.stats, self._stats) if is_copied else ():
                stats.num_copied_tokens += sum(verified)
                stats.num_accepted_copied_tokens += accepted
        if any(drafts.drafted):
            kinds = (
                int(request.submit.sampling.temperature > 0) if is_drafted else -1
                for request, is_drafted in zip(step.decode, drafts.drafted, strict=True)
            )
            self._head_acceptance.observe(drafts.trees, verdicts[: len(step.decode)], list(kinds))
        self._stats.num_drafts += drafts.num_trees
        self._stats.add_nodes(
            _column_sums(drafts.pruned),
            _column_sums(drafts.verified),
            _column_sums([[1] * num for num in num_accepted]),
        )

    def _buffer_states(self, step: Step, drafts: DraftBatch, verdicts: list[Verdict]) -> None:
        """Buffer the new positions' states for the drafter, unless no request has one."""
        requests = [request for request, _ in step.prefill] + step.decode
        if not any(request.has_drafter for request in requests) or (state_NX := self._target.states()) is None:
            return
        begins = drafts.trees.offsets.tolist()
        chunks = accumulate((chunk.stop - chunk.start for _, chunk in step.prefill), initial=begins[-1])
        rows = [list(range(*span)) for span in pairwise(chunks)]
        rows += [_rows(begin, verdict.path) for begin, verdict in zip(begins[:-1], verdicts, strict=False)]
        self._hidden_states.add(list(zip(requests, rows, strict=True)), state_NX)

    def _publish(self, requests: list[Request]) -> None:
        """Publish the pages of these requests up to the first slot that still waits for a move."""
        settled = {move.request: move.target for move in reversed(self._moves)}  # a request's first move is its lowest
        for request in requests:
            self._prefix_cache.publish(request, settled.get(request, request.num_computed))

    def _append(
        self, request: Request, new: NewTokens, begin: int, *, is_copied: bool, tree: TreeRecord | None
    ) -> None:
        """Commit tokens of a tree whose rows begin at `begin`, and release a finished request."""
        if request.has_grammar and (failure := self._grammar_failure(request)):
            self._release(request)
            self._fail(request, failure, GRAMMAR_FAILED)
            return
        kept, sampling = new.tokens, request.submit.sampling
        request.append(kept)
        self._stats.generation_tokens += len(kept)
        if new.finish_reason:
            self._stats.requests_finished += 1
            self._release(request)
        logprobs = None
        if sampling.num_logprobs is not None:
            rows = _rows(begin, new.path)[: len(kept)]
            logprobs = self._target.logprobs(rows, kept, sampling.num_logprobs, sampling.logprob_token_ids)
        self._chunks.append(
            TokenChunk(
                id=request.id,
                tokens=kept,
                finish_reason=new.finish_reason,
                stop_token=new.stop_token,
                logprobs=logprobs,
                num_cached_tokens=request.num_cached or 0,
                num_accepted=new.num_accepted,
                is_copied=is_copied,
                stats=request.stats,
                tree=tree,
                queued_s=request.queued_s,
            )
        )

    def _grammar_failure(self, request: Request) -> str | None:
        """Return why the request's grammar could not be followed in this step; None if it was."""
        if self._target.grammars is None:
            return None
        failure = self._target.grammars.failure(request.id)
        return failure and f"the output could not follow its grammar: {failure}"

    def _count_allowed(self, request: Request, tokens: list[int]) -> int:
        """Return how many of these tokens, from the first, the request's grammar allows next."""
        state = request.logits_state(self._config.eos_token_ids) if request.has_grammar else None
        if state is None or self._target.grammars is None:
            return len(tokens)
        return self._target.grammars.count_allowed(state, tokens)

    def _emit(self) -> None:
        """Send the front one frame with all chunks since the last; without any, one per heartbeat."""
        now = time.monotonic()
        if not self._chunks and now - self._last_emit < HEARTBEAT_S:
            return
        self._stats.has_drafter = self._drafter.is_connected
        self._stats.num_running, self._stats.num_waiting = len(self._running), len(self._waiting)
        self._head_acceptance.report(self._stats)
        self._stats.kv_usage = 1 - self._allocator.num_free / (self._allocator.num_pages - 1)
        self._front.send(StepOutput(chunks=self._chunks, stats=self._stats))
        self._chunks, self._last_emit = [], now


def _rows(begin: int, path: Sequence[int]) -> list[int]:
    """Return the rows of a tree's root and of an accepted path; `begin` is the root's."""
    return [begin, *(begin + row for row in path)] if path else [begin]


def _column_sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Add up rows of different lengths."""
    return list(map(sum, zip_longest(*rows, fillvalue=0)))
