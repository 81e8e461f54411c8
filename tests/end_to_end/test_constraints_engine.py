"""Real engines with constrained requests: every token equals that of a plain loop over transformers' logits.

There is one engine per kind of speculation; requests with all kinds of constraints run together. The loop has no trees
and no cache: it applies the constraints by the oracle and adds the shared noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from tests.support import oracles
from tests.support.engines import (
    BUNDLED,
    CHAIN,
    DYNAMIC,
    STATIC,
    GenerationJob,
    Runner,
    bundled,
    prompts,
    transformers_greedy,
)
from workers.comm.ipc import Speculation
from workers.config import EngineConfig
from workers.sampling.sampler import draw
from workers.settings import Constraints, SamplingSettings
from workers.types import SamplingBatch

NUM_TOKENS = 16
SAMPLINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "sampled": SamplingSettings(temperature=1.0, seed=(1 << 64) - 3),
    "cut": SamplingSettings(temperature=1.0, top_p=0.9, min_p=0.01, seed=21),
}
KINDS = [
    "presence", "frequency", "repetition", "bias", "bad words", "allowed ids", "min tokens", "all", "unconstrained"
]  # fmt: skip
ENGINES: dict[str, Callable[[], EngineConfig]] = {
    "dynamic tree": lambda: bundled(DYNAMIC, eos_token_ids=ends()),
    "no speculation": lambda: bundled(eos_token_ids=ends()),
    "chain": lambda: bundled(CHAIN, eos_token_ids=ends()),
    "static tree": lambda: bundled(STATIC, eos_token_ids=ends()),
    "dynamic tree of a draft model": lambda: bundled(DYNAMIC, method="draft_model", eos_token_ids=ends()),
    "dynamic tree, TP 2": lambda: bundled(DYNAMIC, tp=2, eos_token_ids=ends()),
}


@cache
def some_prompts() -> list[list[int]]:
    return sorted(prompts(8), key=len)[:2]


@cache
def free_texts() -> list[list[int]]:
    """Return the target's unconstrained output, from which the constraints are made."""
    torch.set_num_threads(1)
    return transformers_greedy(some_prompts(), NUM_TOKENS)


@cache
def ends() -> tuple[int, ...]:
    """Return end tokens that come early in every text unless they are forbidden."""
    return tuple(sorted({text[3] for text in free_texts()}))


def constraints(kind: str, free: list[int]) -> Constraints:
    """Return constraints that the unconstrained text `free` violates."""
    frequent = [token for token, _ in Counter(free).most_common(3)]
    bias = {free[0]: -3.0, free[5]: -100.0, 300: 2.5}
    bad_words = [[frequent[0]], free[4:6], free[7:10], free[10:12]]
    match kind:
        case "presence":
            return Constraints(presence_penalty=1.8)
        case "frequency":
            return Constraints(frequency_penalty=1.2)
        case "repetition":
            return Constraints(repetition_penalty=1.4)
        case "bias":
            return Constraints(logit_bias=bias)
        case "bad words":
            return Constraints(bad_words=bad_words)
        case "allowed ids":
            return Constraints(allowed_token_ids=sorted({*range(100, 1500), *free[:8]} - {frequent[0]}))
        case "min tokens":
            return Constraints(min_tokens=11)
        case "all":
            return Constraints(
                presence_penalty=0.3,
                frequency_penalty=0.4,
                repetition_penalty=1.15,
                logit_bias=bias,
                bad_words=bad_words,
                allowed_token_ids=list(range(20, 1800)),
                min_tokens=11,
            )
        case _:
            return Constraints()


def jobs(sampling: str) -> list[GenerationJob]:
    """Return jobs for every prompt under every kind of constraint."""
    return [
        GenerationJob(
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            sampling=replace(SAMPLINGS[sampling], constraints=constraints(kind, free)),
            ignore_eos=kind not in ("min tokens", "all"),
        )
        for prompt, free in zip(some_prompts(), free_texts(), strict=True)
        for kind in KINDS
    ]


@cache
def truth(sampling: str) -> list[list[int]]:
    """Return each job's tokens by the plain loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    return [plain(model, job) for job in jobs(sampling)]


@torch.inference_mode()
def plain(model: torch.nn.Module, job: GenerationJob) -> list[int]:
    end_token_ids = () if job.ignore_eos else ends()
    batch = SamplingBatch.stack([job.sampling])
    prompt, output = tuple(job.prompt), ()
    while len(output) < job.max_tokens and not (output and output[-1] in end_token_ids):
        logits = model(torch.tensor([prompt + output])).logits[0, -1].tolist()
        edited = oracles.constrain(
            dict(enumerate(logits)), job.sampling.constraints, end_token_ids, prompt, output
        ).values()
        output += (int(draw(torch.tensor([list(edited)]), batch, torch.tensor([len(prompt + output)]))),)
    return list(output)


FEW = {("dynamic tree", "greedy"), ("dynamic tree", "cut"), ("dynamic tree, TP 2", "cut")}
CELLS = [pytest.param(*cell, marks=[] if cell in FEW else pytest.mark.full) for cell in product(ENGINES, SAMPLINGS)]


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Runner(ENGINES[request.param]()) as running:
        yield running


@pytest.mark.parametrize(("runner", "sampling"), CELLS, indirect=["runner"])
def test_constrained_tokens_equal_the_plain_loops(runner: Runner, sampling: str) -> None:
    answers = runner.run(jobs(sampling), concurrency=8)
    assert [answer.tokens for answer in answers] == truth(sampling)
    if runner.config.draft is not None:
        for i, kind in enumerate(KINDS):
            assert sum(a.stats.num_accepted_tokens for a in answers[i :: len(KINDS)]) > 0, f"{kind}: nothing accepted"


def under_rejection(sampling: str) -> list[GenerationJob]:
    return [replace(job, speculation=Speculation(acceptance="rejection")) for job in jobs(sampling)]


@pytest.mark.parametrize("runner", ["dynamic tree"], indirect=True)
def test_greedy_tokens_are_the_same_under_rejection(runner: Runner) -> None:
    answers = runner.run(under_rejection("greedy"), concurrency=8)
    assert [answer.tokens for answer in answers] == truth("greedy")


def test_every_kind_of_constraint_changes_the_output() -> None:
    of_kind = {kind: truth("greedy")[i :: len(KINDS)] for i, kind in enumerate(KINDS)}
    assert of_kind.pop("unconstrained") == free_texts()
    for kind, texts in of_kind.items():
        # An end token cuts the others short; min_tokens keeps it away until then.
        assert all(text != free[: len(text)] for text, free in zip(texts, free_texts(), strict=True)), kind
        if kind in ("min tokens", "all"):
            assert all(len(text) >= 11 for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["dynamic tree"], indirect=True)
def test_sampled_drafts_never_break_a_hard_constraint(runner: Runner) -> None:
    """`rejection` guarantees the distribution, not the tokens; forbidden tokens must still never occur."""
    sampled = under_rejection("sampled")
    for job, answer in zip(sampled, runner.run(sampled, concurrency=8), strict=True):
        asked = job.sampling.constraints
        for end in range(1, len(answer.tokens) + 1):
            assert not any(answer.tokens[:end][-len(word) :] == word for word in asked.bad_words)
        assert asked.allowed_token_ids is None or set(answer.tokens) <= set(asked.allowed_token_ids)
        assert not job.ignore_eos or len(answer.tokens) == NUM_TOKENS
        assert job.ignore_eos or len(answer.tokens) > asked.min_tokens
