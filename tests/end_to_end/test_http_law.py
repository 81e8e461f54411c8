"""The distribution of served text, end to end: HTTP, tokenizer, engine, drafter and verifier."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain

import pytest
import torch
from scipy.stats import chisquare

from cluster.local_service import local_service
from secateur import AsyncClient
from secateur.config import EngineArgs
from tests.support.engines import BUNDLED

PROMPT = "def get"
TOP_K, LENGTH, SAMPLES, TEMPERATURE = 3, 3, 800, 1.0
MIN_EXPECTED = 8
"""Outcomes expected less often than this are pooled, as the chi-square approximation asks."""


def exact_law() -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of LENGTH tokens under top-k sampling, by enumeration."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(BUNDLED / "target").encode(PROMPT, add_special_tokens=False)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tail, weight in law.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *tail]])).logits[0, -1].double()
            best = logits.topk(TOP_K)
            for token, p in zip(best.indices.tolist(), (best.values / TEMPERATURE).softmax(0).tolist(), strict=True):
                longer[(*tail, token)] = weight * p
        law = longer
    return law


async def sample(base_url: str) -> Counter[tuple[int, ...]]:
    """Return SAMPLES answers to one prompt, sixteen at a time, with different seeds: two requests for eight each."""
    seats = asyncio.Semaphore(2)
    async with AsyncClient(base_url) as client:

        async def eight(seed: int) -> list[tuple[int, ...]]:
            async with seats:
                answer = await client.complete(
                    PROMPT,
                    max_tokens=LENGTH,
                    temperature=TEMPERATURE,
                    top_k=TOP_K,
                    seed=seed,
                    n=8,
                    ignore_eos=True,
                    return_token_ids=True,
                )
                return [tuple(choice.token_ids or ()) for choice in answer.choices]

        return Counter(chain.from_iterable(await asyncio.gather(*map(eight, range(SAMPLES // 8)))))


@pytest.mark.slow
def test_texts_served_over_http_follow_the_target_s_law() -> None:
    torch.set_num_threads(1)
    law = exact_law()
    with local_service(EngineArgs.load({"port": 0, "device": "cpu", "max_model_len": 256})) as base_url:
        seen = asyncio.run(sample(base_url))
    assert set(seen) <= set(law), "a continuation outside the top-k was served"
    often = [outcome for outcome in law if law[outcome] * SAMPLES >= MIN_EXPECTED]
    rare = 1 - sum(law[outcome] for outcome in often)
    expected = [law[outcome] * SAMPLES for outcome in often] + [rare * SAMPLES]
    observed = [seen[outcome] for outcome in often] + [sum(seen[o] for o in law if o not in often)]
    if rare * SAMPLES < MIN_EXPECTED:
        expected, observed = [*expected[:-2], sum(expected[-2:])], [*observed[:-2], sum(observed[-2:])]
    assert chisquare(observed, expected).pvalue > 1e-4
