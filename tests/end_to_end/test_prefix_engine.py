"""A long shared prefix of two requests in real engines: computed once, without a change of the output.

`pytest -s` reports the time to the first token with and without it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cluster.engine.engine_client import EngineClient
from cluster.engine.local_engine import LocalEngine
from tests.end_to_end.test_methods import METHODS
from tests.support.engines import DYNAMIC, bundled, prompts
from workers.comm.ipc import RequestStats, Speculation, Submit
from workers.config import DraftConfig, EngineConfig, PruneConfig, SimulatedCosts
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
    first_token_ms: float


async def ask(client: EngineClient, prompt: list[int], kind: str, salt: str) -> Told:
    sampling, speculation = ASKED[kind]
    submit = Submit(
        id=client.new_id(), prompt=prompt, max_tokens=24, sampling=sampling, speculation=speculation, ignore_eos=True,
        cache_salt=salt,
    )  # fmt: skip
    began, first, tokens = time.perf_counter(), 0.0, []
    async for chunk in client.submit(submit):
        first = first or 1e3 * (time.perf_counter() - began)
        tokens += chunk.tokens
    assert chunk.stats is not None
    return Told(tokens, chunk.stats, chunk.num_cached_tokens, first)


@pytest.mark.parametrize(
    "engine",
    [pytest.param(e, marks=[] if e in ("off", "eagle3", "draft_model") else pytest.mark.full) for e in ENGINES],
)
def test_a_request_behind_a_shared_prefix_computes_the_rest_alone(engine):
    async def compare() -> None:
        async with LocalEngine(ENGINES[engine]) as client:
            await ask(client, SECOND[-40:], "greedy", "warm-up")
            for kind in ASKED:
                alone = await ask(client, SECOND, kind, f"{kind} alone")
                before = replace(client.stats)
                await ask(client, FIRST, kind, kind)
                second = await ask(client, SECOND, kind, kind)
                if kind != "rejection":  # whose seed promises no tokens
                    assert (second.tokens, second.stats) == (alone.tokens, alone.stats), kind
                assert (alone.num_cached, second.num_cached) == (0, SHARED)
                assert client.stats.prefix_cache_queries - before.prefix_cache_queries == len(FIRST) + len(SECOND)
                assert client.stats.prefix_cache_hits - before.prefix_cache_hits == SHARED
                told = f"{alone.first_token_ms:.0f} ms alone, {second.first_token_ms:.0f} ms behind a shared prefix"
                print(f"\n{engine}, {kind}: first token after {told}")
            if ENGINES[engine].draft is not None:
                assert alone.stats.num_drafts > 0

    asyncio.run(compare())


REPEATED = {**METHODS, **{name: lambda _, name=name: ENGINES[name] for name in ("off", "eagle3", "draft_model")}}
DEAR = PruneConfig(
    auto=True,
    prompt_lookup=False,
    simulated_costs=SimulatedCosts(step_ms=1, row_ms=1, draft_ms=1000, level_ms=1000),
)


def under_auto(config: EngineConfig) -> EngineConfig:
    """Return the same with drafting off, because it is dear, for the 31 steps before `auto` probes it."""
    if (draft := config.draft) is None:
        return config
    return replace(config, draft=replace(draft, tree=replace(draft.tree, prune=DEAR)))


@pytest.mark.parametrize("method", REPEATED)
def test_a_short_prompt_is_found_the_second_time_whether_or_not_it_is_drafted_for(method: str, tmp_path: Path) -> None:
    async def compare() -> None:
        config = under_auto(REPEATED[method](tmp_path))
        async with LocalEngine(config) as client:
            for is_auto in (True, False):
                for length in (17, 50):
                    prompt = [3 + token % 60 for token in SECOND[:length]]
                    submit = Submit(
                        id=0, prompt=prompt, max_tokens=8, sampling=SamplingSettings(seed=length), ignore_eos=True,
                        speculation=Speculation(auto=is_auto), cache_salt=f"{is_auto} {length}",
                    )  # fmt: skip
                    told = []
                    for _ in range(2):
                        own = [c async for c in client.submit(replace(submit, id=client.new_id()))]
                        told.append(([token for chunk in own for token in chunk.tokens], own[-1].num_cached_tokens))
                        if method not in ("off", "ngram"):  # there is hardly anything to look up
                            assert (own[-1].stats.num_drafts > 0) != is_auto
                    best = (length - 1) // 16 * 16
                    assert told[1] == (told[0][0], best) and told[0][1] == 0, (is_auto, length)

    asyncio.run(compare())
