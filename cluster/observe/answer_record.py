"""Keeps the times and the number of tokens of an answer, for metrics, traces, callers' accounts and the log."""

from __future__ import annotations

import logging
import time

from cluster.observe.metrics import Metrics, RequestTimes
from cluster.observe.rate_limits import Caller
from cluster.observe.tracing import Trace
from workers.comm.ipc import Submit, TokenChunk

logger = logging.getLogger(__name__)


class AnswerRecord:
    """Notes an answer's steps, and reports them. `submitted`, then `arrived` and `returned` by step, then `ended`.

    arrival: time.perf_counter() at the arrival of the HTTP request. caller: whom its tokens are charged to. trace: what
    gets its spans.
    """

    def __init__(
        self,
        submit: Submit,
        request_id: str,
        arrival: float,
        metrics: Metrics,
        caller: Caller | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._submit = submit
        self._request_id = request_id
        self._arrival = arrival
        self._metrics = metrics
        self._caller = caller
        self._trace = trace
        self._num_tokens = 0
        self._submitted_s: float | None = None
        self._scheduled_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._gap_s: float | None = None
        self._reason = ""

    def submitted(self, *, pays_for_prompt: bool) -> None:
        """Note that it goes to the engine. Of the answers to one prompt, one pays for it."""
        self._submitted_s = self._elapsed_s()
        if self._caller is not None and pays_for_prompt:
            self._caller.charge(prompt_tokens=len(self._submit.prompt))

    def arrived(self, chunk: TokenChunk) -> None:
        """Note when a step's chunk came from the engine."""
        if self._scheduled_s is None and self._submitted_s is not None:
            self._scheduled_s = self._submitted_s + chunk.queued_s
            self._metrics.observe_queued(chunk.queued_s)
        self._gap_s = None
        if chunk.tokens:
            now_s, before_s = self._elapsed_s(), self._last_token_s
            self._last_token_s = now_s
            if before_s is None:
                self._first_token_s = now_s
            else:
                self._gap_s = now_s - before_s

    def returned(self, num_tokens: int, num_accepted: int, finish_reason: str | None, *, is_copied: bool) -> None:
        """Count what the latest chunk, or a part of it, added to the answer."""
        self._num_tokens += num_tokens
        self._metrics.observe_tokens(num_tokens, num_accepted, is_copied=is_copied, gap_s=self._gap_s)
        self._gap_s = None
        if self._caller is not None:
            self._caller.charge(generation_tokens=num_tokens)
        if finish_reason is not None:
            self.ended(finish_reason)

    def ended(self, reason: str) -> None:
        """Report the whole answer; `reason` is one of `Metrics`. Only the first call counts."""
        if self._reason:
            return
        self._reason = reason
        prompt_tokens, total_s = len(self._submit.prompt), self._elapsed_s()
        times = RequestTimes(
            submitted=self._submitted_s,
            scheduled=self._scheduled_s,
            first_token=self._first_token_s,
            last_token=self._last_token_s,
            end=total_s,
        )
        self._metrics.observe_finished(
            reason,
            times,
            prompt_tokens=prompt_tokens,
            generation_tokens=self._num_tokens,
            max_tokens=self._submit.max_tokens,
        )
        if self._trace is not None:
            attributes: dict[str, str | int] = {
                "gen_ai.request.id": self._request_id,
                "gen_ai.request.max_tokens": self._submit.max_tokens,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_tokens,
            }
            self._trace.record(reason, times, attributes)
        logger.info(
            "request %s/%d: %s after %d prompt and %d new tokens, %.3f s, seed %d",
            self._request_id,
            self._submit.id,
            reason,
            prompt_tokens,
            self._num_tokens,
            total_s,
            self._submit.sampling.seed,
        )

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._arrival
