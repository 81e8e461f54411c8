"""Engines with a KV cache in 8 bits: speculation, cached prefixes and preemption change no token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.engines import AUTO, CHAIN, DYNAMIC, STATIC, GeneratedAnswer, GenerationJob, Runner, bundled, prompts
from workers.comm.ipc import Speculation
from workers.config import EngineConfig, SimulatedCosts
from workers.settings import SamplingSettings

SMALL = {"max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_dtype": "fp8"}
PRICED = replace(AUTO, prune=replace(AUTO.prune, simulated_costs=SimulatedCosts(step_ms=10, row_ms=0.01)))
"""With measured costs, a busy machine would draft less."""
ENGINES = {
    "chain": bundled(CHAIN, **SMALL),
    "static": bundled(STATIC, **SMALL),
    "dynamic": bundled(DYNAMIC, **SMALL),
    "auto, draft model": bundled(PRICED, method="draft_model", **SMALL),
    "dynamic, TP 2": bundled(DYNAMIC, tp=2, draft_tp=2, **SMALL),
}
FEW = ("dynamic", "auto, draft model")
SAMPLINGS = [SamplingSettings(temperature=0.0), SamplingSettings(temperature=0.9, top_p=0.9)]
SHARED = [token for prompt in prompts(3) for token in prompt][:70]
"""The beginning of every second prompt."""


def jobs() -> list[GenerationJob]:
    return [
        GenerationJob(
            prompt=[*SHARED, *prompt[:20]] if i % 2 else prompt[:90],
            max_tokens=40 + 8 * (i % 5),
            sampling=replace(SAMPLINGS[i // 2 % 2], seed=i),
        )
        for i, prompt in enumerate(prompts(12))
    ]


@pytest.fixture(scope="module")
def plain() -> list[GeneratedAnswer]:
    with Runner(bundled(**SMALL)) as runner:
        return runner.run(jobs())


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name in FEW else pytest.mark.full) for name in ENGINES]
)
def test_speculation_and_lack_of_pages_change_no_token(engine: str, plain: list[GeneratedAnswer]) -> None:
    config = ENGINES[engine]
    with Runner(replace(config, num_pages=24)) as runner:
        drafted = runner.run(jobs(), concurrency=8)
        alone = runner.run([replace(job, speculation=Speculation(enabled=False)) for job in jobs()], concurrency=8)
        assert runner.stats.num_preemptions > 0 and runner.stats.prefix_cache_hits > 0
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in plain]
    assert sum(answer.stats.num_accepted_tokens for answer in drafted) > 100
    assert not sum(answer.stats.num_drafts for answer in alone)


def test_keys_and_values_are_rounded_and_drafts_accepted_as_often(plain: list[GeneratedAnswer]) -> None:
    def accepted(config: EngineConfig) -> float:
        with Runner(config) as runner:
            answers = runner.run(jobs(), concurrency=8)
        assert config.kv_cache_dtype == "fp8" or [a.tokens for a in answers] != [a.tokens for a in plain]
        stats = [answer.stats for answer in answers]
        return sum(one.num_accepted_tokens for one in stats) / sum(one.num_drafts for one in stats)

    fp8 = accepted(ENGINES["dynamic"])
    assert fp8 > 0.8 * accepted(replace(ENGINES["dynamic"], kv_cache_dtype="auto"))
