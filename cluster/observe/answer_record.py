"""Keeps the times and the number of tokens of an answer, for metrics, traces, callers' accounts and the log."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from cluster.observe.metrics import Metrics, RequestTimes
from cluster.observe.rate_limits import Caller
from cluster.observe.tracing import Trace
from workers.comm.ipc import Submit, TokenChunk

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AnswerRecord:
    """Notes an answer's steps, and reports them. `submitted`, then `arrived` and `returned` by step, then `ended`.

    arrival: time.perf_counter() at the arrival of the HTTP request. caller: whom its tokens are charged to. trace: what
    gets its spans.
    """

    submit: Submit
    request_id: str
    arrival: float
    metrics: Metrics
    caller: Caller | None = None
    trace: Trace | None = None
    _times: RequestTimes = field(init=False, default_factory=RequestTimes)
    _num_tokens: int = field(init=False, default=0)
    _gap_s: float | None = field(init=False, default=None)
    _reason: str = field(init=False, default="")

    def submitted(self, *, pays_for_prompt: bool) -> None:
        """Note that it goes to the engine. Of the answers to one prompt, one pays for it."""
        self._times.submitted = self._elapsed_s()
        if self.caller is not None and pays_for_prompt:
            self.caller.charge(prompt_tokens=len(self.submit.prompt))

    def arrived(self, chunk: TokenChunk) -> None:
        """Note when a step's chunk came from the engine."""
        times = self._times
        if times.scheduled is None and times.submitted is not None:
            times.scheduled = times.submitted + chunk.queued_s
            self.metrics.observe_queued(chunk.queued_s)
        self._gap_s = None
        if chunk.tokens:
            now_s, before_s = self._elapsed_s(), times.last_token
            times.last_token = now_s
            if before_s is None:
                times.first_token = now_s
            else:
                self._gap_s = now_s - before_s

    def returned(self, num_tokens: int, num_accepted: int, finish_reason: str | None, *, is_copied: bool) -> None:
        """Count what the latest chunk, or a part of it, added to the answer."""
        self._num_tokens += num_tokens
        self.metrics.observe_tokens(num_tokens, num_accepted, is_copied=is_copied, gap_s=self._gap_s)
        self._gap_s = None
        if self.caller is not None:
            self.caller.charge(generation_tokens=num_tokens)
        if finish_reason is not None:
            self.ended(finish_reason)

    def ended(self, reason: str) -> None:
        """Report the whole answer; `reason` is one of `Metrics`. Only the first call counts."""
        if self._reason:
            return
        self._reason, prompt_tokens = reason, len(self.submit.prompt)
        self._times.end = self._elapsed_s()
        self.metrics.observe_finished(
            reason,
            self._times,
            prompt_tokens=prompt_tokens,
            generation_tokens=self._num_tokens,
            max_tokens=self.submit.max_tokens,
        )
        if self.trace is not None:
            attributes: dict[str, str | int] = {
                "gen_ai.request.id": self.request_id,
                "gen_ai.request.max_tokens": self.submit.max_tokens,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_tokens,
            }
            self.trace.record(reason, self._times, attributes)
        logger.info(
            "request %s/%d: %s after %d prompt and %d new tokens, %.3f s, seed %d",
            self.request_id,
            self.submit.id,
            reason,
            prompt_tokens,
            self._num_tokens,
            self._times.end,
            self.submit.sampling.seed,
        )

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.arrival
