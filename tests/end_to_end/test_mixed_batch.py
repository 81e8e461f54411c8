"""Requests of every kind in one batch of a real engine: each gets what it gets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.engines import CHAIN, DYNAMIC, GeneratedAnswer, GenerationJob, Runner, bundled, prompts
from workers.comm.ipc import Speculation
from workers.config import DraftConfig
from workers.settings import Constraints, SamplingSettings

PENALTIES = Constraints(presence_penalty=0.3, frequency_penalty=0.6, repetition_penalty=1.1, min_tokens=20)
REJECTION = Speculation(acceptance="rejection")
KINDS = {
    "greedy": (SamplingSettings(temperature=0.0), Speculation()),
    "greedy under rejection": (SamplingSettings(temperature=0.0), REJECTION),
    "seeded": (SamplingSettings(seed=2**64 - 9), Speculation()),
    "penalised": (SamplingSettings(temperature=0.9, seed=12, constraints=PENALTIES), Speculation()),
    "logprobs": (SamplingSettings(temperature=0.7, seed=13, num_logprobs=3), Speculation()),
    "speculation off": (SamplingSettings(seed=14), Speculation(enabled=False)),
    "rejection": (SamplingSettings(seed=15), REJECTION),
    "rejection, penalised": (SamplingSettings(seed=16, num_logprobs=1, constraints=PENALTIES), REJECTION),
    "rejection without probabilities": (SamplingSettings(seed=17), replace(REJECTION, draft_probs=False)),
    "top-p": (SamplingSettings(temperature=0.8, top_p=0.85, seed=18), Speculation()),
    "top-k under rejection": (SamplingSettings(top_k=20, seed=19), REJECTION),
    "min-p": (SamplingSettings(temperature=1.3, min_p=0.05, seed=20), Speculation()),
    "a narrow tree": (SamplingSettings(seed=21), Speculation(num_speculative_tokens=2)),
}
SAMPLED = ("rejection", "rejection, penalised", "top-k under rejection")
ENGINES = {
    "no speculation": lambda: bundled(max_num_batched_tokens=128),
    "chain": lambda: bundled(CHAIN, max_num_batched_tokens=128),
    "dynamic": lambda: bundled(DYNAMIC, max_num_batched_tokens=256),
    "dynamic, draft model": lambda: bundled(DYNAMIC, method="draft_model", max_num_batched_tokens=256),
    "n-gram": lambda: replace(
        bundled(max_num_batched_tokens=256),
        draft=DraftConfig(method="ngram", model_path="", prompt_lookup_min=1, prompt_lookup_max=3, tree=DYNAMIC),
    ),
    "dynamic, TP 2": lambda: bundled(DYNAMIC, tp=2, max_num_batched_tokens=256),
}


FEW = ("n-gram", "dynamic, TP 2")


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name in FEW else pytest.mark.full) for name in ENGINES]
)
def test_requests_in_a_mixed_batch_get_what_they_get_alone(engine):
    texts = prompts(len(KINDS))
    jobs = [
        GenerationJob(prompt=prompt[: 60 + 10 * i], max_tokens=24, sampling=sampling, speculation=speculation)
        for i, (prompt, (sampling, speculation)) in enumerate(zip(texts, KINDS.values(), strict=False))
    ]
    with Runner(ENGINES[engine]()) as runner:
        alone = runner.run(jobs, concurrency=1)
        together = runner.run(jobs, concurrency=len(jobs))
    told = list(zip(KINDS, jobs, alone, together, strict=True))
    parted = [kind for kind, _, one, other in told if kind in SAMPLED and other.tokens != one.tokens]
    assert len(parted) <= 1, "the last bit of a probability may change a sampled draft, but seldom does"
    for kind, job, one, other in told:
        if kind in parted:
            continue
        assert other.tokens == one.tokens, kind
        assert other.stats == one.stats, f"{kind}: other trees"
        _assert_same_logprobs(other, one)
        assert len(one.logprobs) == (0 if job.sampling.num_logprobs is None else len(one.tokens)), kind


def _assert_same_logprobs(other: GeneratedAnswer, one: GeneratedAnswer) -> None:
    for a, b in zip(other.logprobs, one.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-3)
