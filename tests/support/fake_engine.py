"""A scripted engine with the real IPC protocol, in a thread, without a model and torch.distributed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from workers.comm.ipc import (
    Abort,
    EngineStats,
    FrontGone,
    FrontSockets,
    Ready,
    RequestStats,
    StepOutput,
    Submit,
    TokenChunk,
    TokenLogprobs,
    TreeRecord,
    connect,
)

Script = Callable[[Submit], list[list[int]]]
"""The steps of a request: one list of tokens each."""

HEARTBEAT_S = 0.05
STATS = RequestStats(num_drafts=2, pruned_per_depth=[2, 1, 1], verified_per_depth=[5, 3], accepted_per_depth=[2, 1])


def score(token: int, num: int, chosen: list[int] | None = None) -> TokenLogprobs:
    """Return the logprobs of a token, which is always the second most likely, after the next id.

    A chosen token has its id / -1000, if it is not the token itself.
    """
    if chosen is not None:
        return TokenLogprobs(
            logprob=-1.0, rank=2, top=[(token, -1.0), *((id, id / -1000) for id in chosen if id != token)]
        )
    ranking = [(token + 1, -0.5), (token, -1.0), *((token + place, -float(place)) for place in range(2, 20))]
    return TokenLogprobs(logprob=-1.0, rank=2, top=ranking[:num])


def tree_of(tokens: list[int], num_accepted: int) -> TreeRecord:
    """Return a tree whose accepted nodes are these tokens; a sibling was pruned, and other nodes were not drafted."""
    path = list(range(1, 1 + num_accepted))
    return TreeRecord(
        tokens=[5, *tokens[:num_accepted], 6, -1],
        parents=[-1, *range(num_accepted), 0, num_accepted],
        depths=[0, *path, 1, num_accepted + 1],
        probs=[None, *[0.5] * num_accepted, 1 / 3, None],
        weights=[1.0, *[0.75] * num_accepted, 0.125, None],
        reasons=[0] * (1 + num_accepted) + [3, 2],
        path=path,
        draft_ms=1.25,
        verify_ms=2.5,
    )


class StandingClock:
    """What a module may take for `time`: it stands still until a test adds to `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@dataclass
class _Live:
    submit: Submit
    steps: list[list[int]]
    sent: int = 0
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass
class FakeEngine:
    """Answers each Submit with its script's steps, one per turn of its loop.

    `drafts`: whether all tokens of a step but the last count as drafted and accepted; otherwise every request has the
    statistics `STATS`. `hold`: while set, the engine hangs: it runs no step and sends nothing. Otherwise it sends
    heartbeats while idle, as an engine does. `before_step` is called before each step with requests; it may wait.
    `aborted` and `submitted` hold the messages that it received.
    """

    address: str
    script: Script
    eos: tuple[int, ...] = ()
    max_model_len: int = 2048
    vocab_size: int = 2048
    step_s: float = 0.0
    before_step: Callable[[], object] = lambda: None
    drafts: bool = False
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._live: dict[int, _Live] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def die(self) -> None:
        """Close the socket, as the kernel does for a dead process."""
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        topology: list[dict[str, str | int]] = [{"role": "verifier 0", "rank": 0, "pid": 1, "device": "fake"}]
        limits = {"max_model_len": self.max_model_len, "vocab_size": self.vocab_size}
        socket = self.sockets = FrontSockets(connect(self.address), Ready(topology=topology, num_pages=8, **limits))
        said, stats = time.monotonic(), EngineStats()
        with suppress(FrontGone):
            while not self._stop.is_set():
                for message in socket.poll(0.005):
                    match message:
                        case Submit():
                            self.submitted.append(message)
                            self._live[message.id] = _Live(message, self.script(message))
                        case Abort(id=id):
                            self.aborted.append(id)
                            self._live.pop(id, None)
                if self.hold.is_set() or socket.is_behind:
                    continue
                if self._live:
                    self.before_step()
                if chunks := [chunk for live in list(self._live.values()) for chunk in self._step(live)]:
                    self._stop.wait(self.step_s)
                    stats = self._stats()
                if chunks or time.monotonic() - said >= HEARTBEAT_S:
                    socket.send(StepOutput(chunks=chunks, stats=stats))
                    said = time.monotonic()
        socket.close()

    def _step(self, live: _Live) -> list[TokenChunk]:
        """Return the chunk of one step; before the first one, the log-probabilities of the prompt in two parts."""
        submit, num, before = live.submit, live.submit.num_prompt_logprobs, []
        if num is not None and not live.sent:
            scores = [score(token, num) for token in submit.prompt[1:]]
            before = [TokenChunk(id=submit.id, tokens=[], prompt_logprobs=part) for part in (scores[:2], scores[2:])]
        return [*before, self._answer(live)]

    def _answer(self, live: _Live) -> TokenChunk:
        submit = live.submit
        tokens = live.steps.pop(0) if live.steps else []
        num_drafted = max(0, len(tokens) - 1)
        reason, stop = None, None
        for position, token in enumerate(tokens, start=1):
            is_eos = token in self.eos and not submit.ignore_eos
            if is_eos or token in submit.stop_token_ids:
                tokens, reason, stop = tokens[:position], "stop", token
                break
            if live.sent + position == submit.max_tokens:
                tokens, reason = tokens[:position], "length"
                break
        live.sent += len(tokens)
        if reason is None and not live.steps:
            reason = "length"
        if reason is not None:
            del self._live[submit.id]
        num_accepted = min(num_drafted, len(tokens)) if self.drafts else 0
        if self.drafts:
            live.stats.num_drafts += num_drafted > 0
            live.stats.count_nodes([], [1] * num_drafted, num_accepted)
        num_logprobs, chosen = submit.sampling.num_logprobs, submit.sampling.logprob_token_ids
        return TokenChunk(
            id=submit.id,
            tokens=tokens,
            finish_reason=reason,
            stop_token=stop,
            logprobs=None if num_logprobs is None else [score(token, num_logprobs, chosen) for token in tokens],
            num_cached_tokens=1,
            num_accepted=num_accepted,
            stats=live.stats if self.drafts else STATS,
            tree=tree_of(tokens, num_accepted) if submit.has_trees else None,
        )

    def _stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._live),
            num_drafts=3,
            pruned_per_depth=[4, 2, 1],
            verified_per_depth=[6, 3],
            accepted_per_depth=[3, 2],
            num_preemptions=5,
            prefix_cache_queries=40,
            prefix_cache_hits=16,
        )
