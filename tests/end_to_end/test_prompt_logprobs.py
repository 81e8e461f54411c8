"""Log-probabilities of prompts equal those of transformers, however the prompts are computed."""

from __future__ import annotations

import asyncio
import random
from functools import cache

import pytest
import torch

from cluster.engine_client import EngineClient
from cluster.local_engine import LocalEngine
from tests.support.engines import BUNDLED, DYNAMIC, bundled
from workers.comm.ipc import Submit, TokenLogprobs
from workers.config import EngineConfig
from workers.types import SamplingParams

VOCAB = 2048
NUM_TOP = 3
SETTINGS = {"max_num_batched_tokens": 70, "max_num_seqs": 4}  # most prompts take several chunks
ENGINES = {
    "plain": bundled(**SETTINGS),
    "eagle3": bundled(DYNAMIC, **SETTINGS),
    "tp 2": bundled(tp=2, **SETTINGS),
    # The answers grow until the requests preempt each other.
    "preempting": bundled(**SETTINGS | {"num_pages": 34}),
}


def random_prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in (1, 2, 65, 130, 256, 300)]


@cache
def reference() -> list[torch.Tensor]:
    """Return log_softmax [tokens, vocabulary] of each prompt by transformers, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in random_prompts()]


async def ask(client: EngineClient, prompt: list[int], max_tokens: int) -> tuple[list[TokenLogprobs], int]:
    """Return the scores of a prompt and how many of its tokens came from the prefix cache."""
    submit = Submit(
        id=client.new_id(),
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
        num_prompt_logprobs=NUM_TOP,
    )
    scores: list[TokenLogprobs] = []
    async for chunk in client.submit(submit):
        scores += chunk.prompt_logprobs or []
    return scores, chunk.num_cached_tokens


def check(prompt: list[int], scores: list[TokenLogprobs], logp_NV: torch.Tensor) -> None:
    assert len(scores) == len(prompt) - 1
    for position, (token, score) in enumerate(zip(prompt[1:], scores, strict=True)):
        row = logp_NV[position]
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert score.rank == pytest.approx(int((row > row[token]).sum()) + 1, abs=1)  # neighbours may be almost equal
        values = torch.tensor([value for _, value in score.top])
        torch.testing.assert_close(values, row.topk(NUM_TOP).values, atol=1e-3, rtol=0)
        torch.testing.assert_close(values, row[[id for id, _ in score.top]], atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ENGINES)
def test_scores_of_random_prompts_are_those_of_transformers(kind: str) -> None:
    config: EngineConfig = ENGINES[kind]

    async def compare() -> None:
        async with LocalEngine(config) as client:
            for _ in range(2):  # the second time, the prefix cache holds every prompt
                num = 150 if kind == "preempting" else 24
                told = await asyncio.gather(*(ask(client, prompt, num) for prompt in random_prompts()))
                for prompt, (scores, num_cached), logp_NV in zip(random_prompts(), told, reference(), strict=True):
                    check(prompt, scores, logp_NV)
                    assert num_cached == 0
            if kind == "preempting":
                assert client.stats.num_preemptions > 0

    asyncio.run(compare())
