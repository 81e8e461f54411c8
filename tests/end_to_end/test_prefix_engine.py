"""A long shared prefix of two requests in real engines: computed once, without a change of the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.support.engines import DYNAMIC, Runner, ask, bundled, prompts
from workers.comm.ipc import RequestStats, Speculation, Submit
from workers.config import DraftConfig
from workers.settings import SamplingSettings

PREFIX = [token for prompt in prompts() for token in prompt][:1000]
FIRST, SECOND = (PREFIX + prompt[:11] for prompt in prompts(2))
SHARED = 1000 // 16 * 16
LONG = {"max_model_len": 1200, "max_num_seqs": 4, "max_num_batched_tokens": 512}
NGRAM = DraftConfig(method="ngram", model_path="", prompt_lookup_min=1, prompt_lookup_max=3, tree=DYNAMIC)
ENGINES = {
    "off": bundled(**LONG),
    "eagle3": bundled(DYNAMIC, **LONG),
    "draft_model": bundled(DYNAMIC, method="draft_model", **LONG),
    "ngram": replace(bundled(**LONG), draft=NGRAM),
    "eagle3, TP 2": bundled(DYNAMIC, tp=2, **LONG),
}
ASKED = {
    "greedy": (SamplingSettings(temperature=0.0), Speculation()),
    "seeded": (SamplingSettings(seed=5), Speculation()),
    "rejection": (SamplingSettings(seed=6), Speculation(acceptance="rejection")),
}


@dataclass(frozen=True, slots=True)
class Told:
    tokens: list[int]
    stats: RequestStats  # the same trees
    num_cached: int


def told(runner: Runner, prompt: list[int], kind: str, salt: str) -> Told:
    sampling, speculation = ASKED[kind]
    submit = Submit(
        id=0, prompt=prompt, max_tokens=24, sampling=sampling, speculation=speculation, ignore_eos=True, cache_salt=salt
    )
    chunks = ask(runner, submit)
    assert chunks[-1].stats is not None
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return Told(tokens, chunks[-1].stats, chunks[-1].num_cached_tokens)


@pytest.fixture(
    scope="module",
    params=[pytest.param(e, marks=[] if e in ("off", "eagle3", "draft_model") else pytest.mark.full) for e in ENGINES],
)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Runner(ENGINES[request.param]) as running:
        yield running


def test_a_request_behind_a_shared_prefix_computes_the_rest_alone(runner: Runner) -> None:
    for kind in ASKED:
        alone = told(runner, SECOND, kind, f"{kind} alone")
        before = replace(runner.stats)
        told(runner, FIRST, kind, kind)
        second = told(runner, SECOND, kind, kind)
        if kind != "rejection":  # whose seed promises no tokens
            assert (second.tokens, second.stats) == (alone.tokens, alone.stats), kind
        assert (alone.num_cached, second.num_cached) == (0, SHARED)
        assert runner.stats.prefix_cache_queries - before.prefix_cache_queries == len(FIRST) + len(SECOND)
        assert runner.stats.prefix_cache_hits - before.prefix_cache_hits == SHARED
    if runner.config.draft is not None:
        assert alone.stats.num_drafts > 0
