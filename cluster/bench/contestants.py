"""Whose speed is compared: our engine, and transformers' `generate` in its ways. All answer the same jobs.

Everybody computes with one thread per process on CPU. Ours has two processes, drafter and verifier; so that the peer
may use as many cores, `generate_2_threads` is measured beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from cluster.bench.runner import GenerationJob, Runner, StatsSnapshot
from workers.comm.ipc import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One answer. Seconds count from when it was asked for."""

    tokens: list[int]
    first_seconds: float
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        """After the first token, as `vllm bench` defines TPOT."""
        return (self.seconds - self.first_seconds) / (len(self.tokens) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """All jobs answered once."""

    seconds: float
    timings: list[Timing]
    steps: StepBreakdown | None = None

    @property
    def tokens_per_second(self) -> float:
        return sum(len(timing.tokens) for timing in self.timings) / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Means over the steps that only decode, in milliseconds; counts are per request and step."""

    num_steps: int
    tokens_per_step: float
    acceptance_length: float
    verified_per_step: float
    draft_ms: float
    transfer_ms: float
    pack_ms: float
    forward_ms: float
    accept_ms: float
    commit_ms: float
    """Making room and committing."""
    between_ms: float
    """From one step to the next: taking requests, scheduling, telling the front."""

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.transfer_ms + self.forward_ms + self.host_ms

    @property
    def host_ms(self) -> float:
        return self.pack_ms + self.accept_ms + self.commit_ms + self.between_ms

    @property
    def outside_models(self) -> float:
        """Share of the step in which neither model computes."""
        return (self.host_ms + self.transfer_ms) / self.total_ms


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def max_batch(self) -> int | None:
        """Most requests at a time; None = any number."""

    def take_turn(self, jobs: Sequence[GenerationJob], batch: int) -> Turn: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SecateurContestant:
    """A running engine. Two contestants may share one, told apart by what their requests ask for."""

    name: str
    runner: Runner
    speculation: Speculation = Speculation()
    max_batch: int | None = None

    def take_turn(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        asked = [replace(job, speculation=self.speculation) for job in jobs]
        began = time.perf_counter()
        answers = self.runner.run(asked, concurrency=batch)
        return Turn(
            seconds=time.perf_counter() - began,
            timings=[
                Timing(tokens=answer.tokens, first_seconds=answer.first_seconds, seconds=answer.seconds)
                for answer in answers
            ],
            steps=decoding_steps(self.runner.frames, batch),
        )


def decoding_steps(frames: Sequence[StatsSnapshot], batch: int) -> StepBreakdown | None:
    """The steps in which exactly `batch` requests decode and no prompt is computed; None if there is none.

    The first after a prompt does not count either: it feeds the prompt to the drafter.
    """
    spans = []
    for before, old, new in zip(frames, frames[1:], frames[2:], strict=False):
        had_prompt = new.stats.prompt_tokens > before.stats.prompt_tokens
        is_full = old.stats.num_running == batch and old.stats.num_waiting == 0
        if not had_prompt and is_full and new.stats.steps == old.stats.steps + 1:
            spans.append((old, new))
    if not spans:
        return None
    count = len(spans)

    def mean_ms(name: str) -> float:
        return 1e3 * sum(getattr(new.stats, name) - getattr(old.stats, name) for old, new in spans) / count

    def per_request(name: str) -> float:
        return sum(getattr(new.stats, name) - getattr(old.stats, name) for old, new in spans) / count / batch

    draft, transfer, forward, accept = map(
        mean_ms, ("draft_seconds", "transfer_seconds", "forward_seconds", "accept_seconds")
    )
    verify, step, drafts = mean_ms("verify_seconds"), mean_ms("step_seconds"), per_request("num_drafts")
    return StepBreakdown(
        num_steps=count,
        tokens_per_step=per_request("generation_tokens"),
        acceptance_length=1 + per_request("num_accepted_tokens") / drafts if drafts else 1.0,
        verified_per_step=per_request("num_verified_tokens"),
        draft_ms=draft,
        transfer_ms=transfer,
        pack_ms=verify - forward - accept,
        forward_ms=forward,
        accept_ms=accept,
        commit_ms=step - verify - draft - transfer,
        between_ms=1e3 * sum(new.at - old.at for old, new in spans) / count - step,
    )


def median_steps(turns: Sequence[StepBreakdown]) -> StepBreakdown | None:
    """Each part's median over the turns; None without any."""
    if not turns:
        return None
    values = [asdict(turn) for turn in turns]
    medians = {key: statistics.median(value[key] for value in values) for key in values[0]}
    return StepBreakdown(**medians | {"num_steps": int(medians["num_steps"])})


class TransformersContestant:
    """transformers' `generate`; `options` choose its way. Batches are padded on the left and decode to the end."""

    def __init__(
        self, name: str, model: Any, *, threads: int = 1, max_batch: int | None = None, **options: object
    ) -> None:
        self.name, self.max_batch = name, max_batch
        self._model, self._threads, self._options = model, threads, options

    def take_turn(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        timings: list[Timing] = []
        with _threads(self._threads):
            began = time.perf_counter()
            for start in range(0, len(jobs), batch):
                timings += self._answer(jobs[start : start + batch])
            return Turn(seconds=time.perf_counter() - began, timings=timings)

    def _answer(self, jobs: Sequence[GenerationJob]) -> list[Timing]:
        longest, count = max(len(job.prompt) for job in jobs), jobs[0].max_tokens
        padding = [longest - len(job.prompt) for job in jobs]
        ids = torch.tensor([[0] * pad + job.prompt for pad, job in zip(padding, jobs, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        sampling = jobs[0].sampling
        chosen: dict[str, object] = {"do_sample": False}
        if sampling.temperature > 0:
            chosen = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        device = self._model.device
        clock = _FirstToken(device)
        began = time.perf_counter()
        torch.manual_seed(sampling.seed)
        out = self._model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=[clock],
            **chosen,
            **self._options,
        )
        tokens = out[:, longest:].tolist()  # waits for the device
        seconds = time.perf_counter() - began
        return [Timing(tokens=line, first_seconds=clock.at - began, seconds=seconds) for line in tokens]


class _FirstToken:
    """A stopping criterion that stops nothing: when it is first asked, the first token is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        if not self.at:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def load_model(folder: Path | str, dtype: str, device: str) -> Any:
    """A model as transformers runs it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
    return model.to(device).eval()


def assistant(model: Any, length: int) -> Any:
    """The model, to draft chains of always so many tokens."""
    model.generation_config.num_assistant_tokens = length
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
