"""Log-probabilities of prompts equal those of transformers, however the prompts are computed."""

from __future__ import annotations

import asyncio
import random
from functools import cache

import httpx2
import pytest
import torch

from cluster.engine.engine_client import EngineClient
from cluster.engine.local_engine import LocalEngine
from cluster.local_service import local_service
from secateur.config import EngineArgs
from tests.support.engines import BUNDLED, DYNAMIC, bundled
from workers.comm.ipc import Submit, TokenLogprobs
from workers.config import EngineConfig
from workers.settings import SamplingSettings

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
        sampling=SamplingSettings(temperature=0.0),
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


def test_a_service_answers_the_requests_of_evaluation_harnesses() -> None:
    """lm-eval's `local-completions` sums these for multiple choice and perplexity."""
    args = EngineArgs.load({"port": 0, "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 70})
    prompts, logp = random_prompts()[2:4], reference()[2:4]
    with local_service(args) as url:
        body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        choices = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"]
        alone = body | {"max_tokens": 0, "return_tokens_as_token_ids": True}
        others = httpx2.post(f"{url}/v1/completions", json=alone, timeout=60).raise_for_status().json()["choices"]
    for prompt, choice, other, logp_NV in zip(prompts, choices, others, logp, strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(prompt) + 1 and found["token_logprobs"][0] is None
        begin = len(prompt) // 2  # where the continuation begins
        wanted = sum(float(logp_NV[at - 1, prompt[at]]) for at in range(begin, len(prompt)))
        assert sum(found["token_logprobs"][begin:-1]) == pytest.approx(wanted, abs=1e-3 * len(prompt))
        assert other["logprobs"]["tokens"] == [f"token_id:{id}" for id in prompt]
        best = [max(top, key=top.__getitem__) for top in other["logprobs"]["top_logprobs"][1:]]
        assert best == [f"token_id:{id}" for id in logp_NV[:-1].argmax(-1).tolist()]
