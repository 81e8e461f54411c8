"""Real engines: greedy text equals transformers', and seeded text is the same with any speculation.

There is one engine per (kind of speculation, target TP, draft TP); requests run alone and in batches. `--full` runs all
50 bundled, held-out prompts instead of 4, and every kind with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.engines import CHAIN, DYNAMIC, STATIC, GenerationJob, Runner, bundled, prompts, transformers_greedy
from workers.comm.ipc import Speculation
from workers.settings import SamplingSettings

NUM_TOKENS = 64
SEEDED = [
    SamplingSettings(temperature=0.7, top_p=0.9, seed=11),
    SamplingSettings(temperature=1.0, top_p=0.9, seed=12),
    SamplingSettings(temperature=1.0, seed=(1 << 64) - 3),
    SamplingSettings(temperature=1.3, top_k=20, min_p=0.02, seed=14),
]
"""Beyond top-p: plain temperature (which the shards decide alone under TP), a seed of 64 bits, top-k with min-p."""

ENGINES = {
    "dynamic tree": bundled(DYNAMIC),
    "no speculation": bundled(),
    "chain": bundled(CHAIN),
    "static tree": bundled(STATIC),
    "dynamic tree of a draft model": bundled(DYNAMIC, method="draft_model"),
    "dynamic tree of a draft model, TP 2, draft TP 2": bundled(DYNAMIC, method="draft_model", tp=2, draft_tp=2),
}
ALONE = [ENGINES["no speculation"], ENGINES["dynamic tree"], ENGINES["dynamic tree of a draft model"]]
MORE_OF_A_KIND = {
    "dynamic tree, TP 2": bundled(DYNAMIC, tp=2),
    "no speculation, TP 2": bundled(tp=2),
    "chain, TP 2": bundled(CHAIN, tp=2),
    "static tree, TP 2": bundled(STATIC, tp=2),
    "chain, TP 2, draft TP 2": bundled(CHAIN, tp=2, draft_tp=2),
    "static tree, TP 2, draft TP 2": bundled(STATIC, tp=2, draft_tp=2),
    "dynamic tree, TP 2, draft TP 2": bundled(DYNAMIC, tp=2, draft_tp=2),
}


PARAMS = [pytest.param(config, id=name) for name, config in ENGINES.items()]
PARAMS += [pytest.param(config, id=name, marks=pytest.mark.full) for name, config in MORE_OF_A_KIND.items()]
DYNAMIC_TREE = PARAMS[:1]
"""The first of the engines, which this module's tests can share then."""


@pytest.fixture(scope="module", params=PARAMS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Runner(request.param) as running:
        yield running


@pytest.fixture(params=[1, 8])
def concurrency(request: pytest.FixtureRequest, runner: Runner) -> int:
    """How many requests run at a time: one or eight. Only the engines of ALONE run one at a time without `--full`."""
    if request.param == 1 and runner.config not in ALONE and not request.config.getoption("--full"):
        pytest.skip("a batch has shown it: --full")
    return request.param


@pytest.fixture(scope="module")
def some_prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    return prompts(50 if request.config.getoption("--full") else 4)


@pytest.fixture(scope="module")
def truth(some_prompts: list[list[int]]) -> list[list[int]]:
    torch.set_num_threads(1)
    return transformers_greedy(some_prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def seeded_truth(some_prompts: list[list[int]]) -> list[list[int]]:
    """Run every prompt under every seeded sampling, one request at a time, without speculation."""
    with Runner(bundled()) as plain:
        return [answer.tokens for answer in plain.run(seeded_jobs(some_prompts))]


def seeded_jobs(some_prompts: list[list[int]]) -> list[GenerationJob]:
    return [
        GenerationJob(prompt=prompt, max_tokens=NUM_TOKENS // 2, sampling=sampling)
        for prompt in some_prompts[:6]
        for sampling in SEEDED
    ]


def test_greedy_tokens_equal_transformers_generate(
    runner: Runner, some_prompts: list[list[int]], truth: list[list[int]], concurrency: int
) -> None:
    jobs = [GenerationJob(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in some_prompts]
    answers = runner.run(jobs, concurrency)
    assert [answer.tokens for answer in answers] == truth
    if runner.config.draft is not None:
        assert sum(answer.stats.num_accepted_tokens for answer in answers) > 0, "nothing was ever accepted"


def test_seeded_tokens_do_not_depend_on_speculation_or_neighbours(
    runner: Runner, some_prompts: list[list[int]], seeded_truth: list[list[int]], concurrency: int
) -> None:
    answers = runner.run(seeded_jobs(some_prompts), concurrency)
    assert [answer.tokens for answer in answers] == seeded_truth


@pytest.mark.parametrize("runner", DYNAMIC_TREE, indirect=True)
def test_seeded_tokens_do_not_depend_on_the_request_s_own_speculation(
    runner: Runner, some_prompts: list[list[int]], seeded_truth: list[list[int]]
) -> None:
    """One batch in which every request has other speculative settings."""
    settings = [
        Speculation(enabled=False),
        Speculation(num_speculative_tokens=1),
        Speculation(num_speculative_tokens=5),
        Speculation(rules={"min_prob": 0.3}),
        Speculation(rules={"path_prob": 0.1}),
        Speculation(rules={"min_prob": 1.0}),
        Speculation(num_speculative_tokens=9, rules={"min_prob": 0.2, "path_prob": 0.05}),
    ]
    jobs = [replace(job, speculation=settings[i % len(settings)]) for i, job in enumerate(seeded_jobs(some_prompts))]
    assert [answer.tokens for answer in runner.run(jobs, concurrency=8)] == seeded_truth
