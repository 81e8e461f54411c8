"""With `batch_invariant`, texts in bfloat16 are the same with and without drafts, alone and beside others."""

from __future__ import annotations

import pytest

from tests.support.engines import DYNAMIC, GenerationJob, Runner, bundled, prompts
from workers.comm.ipc import Speculation
from workers.config import EngineConfig
from workers.kernels.select import multiplies_bfloat16
from workers.settings import SamplingSettings

pytestmark = pytest.mark.skipif(not multiplies_bfloat16(), reason="a CPU that does not multiply bfloat16")
OFF = Speculation(enabled=False)
INVARIANT = {"dtype": "bfloat16", "threads": 1, "batch_invariant": True}


@pytest.mark.parametrize(
    "config", [bundled(DYNAMIC, **INVARIANT), bundled(DYNAMIC, tp=4, **INVARIANT)], ids=["TP 1", "TP 4"]
)
def test_texts_do_not_depend_on_drafts_or_on_other_requests(config: EngineConfig) -> None:
    samplings = (SamplingSettings(temperature=0.0), SamplingSettings(temperature=1.2, seed=5))

    def jobs(speculation: Speculation) -> list[GenerationJob]:
        return [
            GenerationJob(prompt=prompt, max_tokens=32, sampling=sampling, speculation=speculation)
            for sampling in samplings
            for prompt in prompts(4)
        ]

    with Runner(config) as runner:
        alone = [answer.tokens for answer in runner.run(jobs(OFF))]
        for speculation in (OFF, Speculation()):
            assert [answer.tokens for answer in runner.run(jobs(speculation), concurrency=12)] == alone
