"""The contestants of a speed benchmark: our engine, and transformers' `generate` with several options.

Those from other projects are in `peers`.

On CPU each process computes with one thread. Ours has two processes, drafter and verifier; `generate_2_threads` gives
transformers as many cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from cluster.bench.breakdown import StepBreakdown, decoding_steps
from cluster.bench.runner import GenerationJob, Runner
from workers.comm.ipc import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One answer. Seconds count from the request."""

    tokens: list[int]
    first_seconds: float
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        """TPOT as `vllm bench` defines it: the first token does not count."""
        return (self.seconds - self.first_seconds) / (len(self.tokens) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contestant's run of all jobs."""

    seconds: float
    timings: list[Timing]
    steps: StepBreakdown | None = None
    """The time of each part of a step; only our engine reports it."""
    acceptance_length: float | None = None
    """Tokens per verified draft, where a peer counts them."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all jobs per second."""
        return sum(len(timing.tokens) for timing in self.timings) / self.seconds


class Contestant(Protocol):
    """Something that answers jobs."""

    @property
    def name(self) -> str:
        """Its name in the report."""

    @property
    def max_batch(self) -> int | None:
        """The most requests at a time; None = any number."""

    @property
    def bytes_per_weight(self) -> float:
        """The mean size of a weight in memory, which every step reads."""

    def take_turn(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        """Answer all jobs, `batch` at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecateurContestant:
    """A running engine. Contestants with different request parameters may share one."""

    name: str
    runner: Runner
    bytes_per_weight: float
    speculation: Speculation = Speculation()
    max_batch: int | None = None

    def take_turn(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        """Answer all jobs, `batch` at a time."""
        requested = [replace(job, speculation=self.speculation) for job in jobs]
        began = time.perf_counter()
        answers = self.runner.run(requested, concurrency=batch)
        return Turn(
            seconds=time.perf_counter() - began,
            timings=[
                Timing(tokens=answer.tokens, first_seconds=answer.first_seconds, seconds=answer.seconds)
                for answer in answers
            ],
            steps=decoding_steps(self.runner.snapshots, batch),
        )


class TransformersContestant:
    """transformers' `generate` with `options`. Batches are padded on the left; all rows run to the same length."""

    def __init__(
        self, name: str, model: Any, *, threads: int = 1, max_batch: int | None = None, **options: object
    ) -> None:
        self.name, self.max_batch = name, max_batch
        self.bytes_per_weight = float(model.dtype.itemsize)
        self._model, self._threads, self._options = model, threads, options

    def take_turn(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        """Answer all jobs, `batch` at a time."""
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
    """A stopping criterion that never stops; its first call marks the time of the first token."""

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
    """Load a model with transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
    return model.to(device).eval()


def assistant(model: Any, length: int) -> Any:
    """Configure a model as an assistant that always drafts `length` tokens."""
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
