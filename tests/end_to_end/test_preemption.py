"""Requests that lose their pages and compute them again have the same output.

The fakes read their prefix from paged memory, and a page is wiped when it is freed, so that stale content shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.support.engines import CHAIN, DYNAMIC, GenerationJob, Runner, bundled, prompts
from tests.support.fakes import Bench, RandomLanguage
from workers.comm.ipc import Speculation, TokenChunk
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.settings import Constraints, SamplingSettings

torch.set_num_threads(1)

TREES = {
    "chain": TreeConfig(kind="chain", num_speculative_tokens=3),
    "static": TreeConfig(
        kind="static", num_speculative_tokens=7, static_paths=((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0))
    ),
    "dynamic": TreeConfig(num_speculative_tokens=12, max_depth=5, max_children=4),
}
PENALISED = Constraints(
    presence_penalty=0.4, frequency_penalty=0.7, repetition_penalty=1.2, logit_bias={3: 1.5}, bad_words=[[7], [2, 9]],
    min_tokens=6,
)  # fmt: skip
REJECTION = Speculation(acceptance="rejection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    prompt: list[int] = field(default_factory=lambda: [i * 5 % 31 for i in range(29)])
    max_tokens: int = 14
    params: SamplingSettings
    more: dict[str, Any] = field(default_factory=dict)

    def submit(self, bench: Bench, **more: Any) -> int:
        return bench.submit(self.prompt, self.max_tokens, self.params, **self.more | more)


KINDS = {
    "greedy": Asked(params=SamplingSettings(temperature=0.0)),
    "coupled": Asked(params=SamplingSettings(seed=3)),
    "penalised": Asked(params=SamplingSettings(temperature=0.8, seed=4, constraints=PENALISED)),
    "logprobs": Asked(params=SamplingSettings(temperature=0.9, top_p=0.9, seed=5, num_logprobs=2)),
    "rejection": Asked(params=SamplingSettings(seed=6), more={"speculation": REJECTION}),
    "rejection, penalised": Asked(
        params=SamplingSettings(seed=7, constraints=PENALISED, num_logprobs=1), more={"speculation": REJECTION}
    ),
    "not drafted for": Asked(params=SamplingSettings(seed=8), more={"speculation": Speculation(enabled=False)}),
}
MORE_SHAPES = [("eagle3", "chain"), ("eagle3", "static")]
SHAPES = [(None, "chain"), ("eagle3", "dynamic"), ("draft_model", "static"), *MORE_SHAPES]


def bench_of(method: Any, tree: str, **settings: Any) -> Bench:
    # Prompts, and what a preempted request computes again, take several chunks.
    settings = {"max_num_batched_tokens": 21, "eos_token_ids": (5,)} | settings
    return Bench(RandomLanguage(), method, TREES[tree], **settings)


def chunks(bench: Bench, id: int) -> list[TokenChunk]:
    """Return everything that the front received for a request, with its id replaced by 0."""
    told = [chunk for frame in bench.frames for chunk in frame.chunks if chunk.id == id]
    return [replace(chunk, id=0, num_cached_tokens=0) for chunk in told]


def alone(bench: Bench, asked: Asked, disturb: Callable[[int], None] = lambda step: None) -> list[TokenChunk]:
    """`chunks` of one request that finds in the cache what it has left there itself, if anything. disturb(k) is called
    before step k."""
    id, step = asked.submit(bench, cache_salt=str(len(bench.answers))), 0
    while id in bench.open:
        disturb(step)
        bench.step()
        step += 1
        assert step < 500, "a request that never finishes"
    return chunks(bench, id)


def preempt_all(bench: Bench) -> None:
    for request in reversed(bench.engine._running.copy()):
        bench.engine.preempt(request)


# ---- one request


def _full(is_full: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.full] if is_full else []


CELLS = [
    pytest.param(*shape, kind, is_cached, marks=_full(shape in MORE_SHAPES or (row + column + is_cached) % 2 > 0))
    for row, shape in enumerate(SHAPES)
    for column, kind in enumerate(KINDS)
    for is_cached in (False, True)
]
"""Every shape and kind with and without the cache, which alternate without `--full`."""


@pytest.mark.parametrize(("method", "tree", "kind", "is_cached"), CELLS)
def test_a_preemption_before_any_step_changes_no_token_no_tree_and_no_logprob(method, tree, kind, is_cached):
    asked = KINDS[kind]
    with bench_of(method, tree, enable_prefix_caching=is_cached) as bench:
        undisturbed = alone(bench, asked)
        num_steps = len(bench.target.steps)
        for k in range(1, num_steps):
            assert alone(bench, asked, lambda step, k=k: preempt_all(bench) if step == k else None) == undisturbed
            assert bench.num_free == 64 and not bench.engine._moves
        stats = bench.frames[-1].stats
        assert stats.num_preemptions == num_steps - 1
        assert stats.prompt_tokens == num_steps * len(asked.prompt), "a prompt counts once"
        assert stats.generation_tokens == num_steps * sum(len(chunk.tokens) for chunk in undisturbed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "tree"),
    [pytest.param(*shape, marks=_full(shape in MORE_SHAPES)) for shape in SHAPES],
)
def test_a_request_preempted_after_every_token_has_the_same_output(method, tree, kind):
    with bench_of(method, tree) as bench:
        undisturbed = alone(bench, KINDS[kind])
        heard = 0

        def whenever_it_spoke(step: int) -> None:
            nonlocal heard
            if len(bench.frames) > heard:
                preempt_all(bench)
            heard = len(bench.frames)

        heard = len(bench.frames)
        assert alone(bench, KINDS[kind], whenever_it_spoke) == undisturbed
        assert bench.frames[-1].stats.num_preemptions == len(undisturbed) - 1 and bench.num_free == 64


def test_a_resumed_request_is_computed_in_chunks_up_to_its_root_and_drafted_for_at_once():
    with bench_of("eagle3", "chain", enable_prefix_caching=False) as bench:
        id = KINDS["greedy"].submit(bench)
        while len(bench.answers[id].tokens) < 5:
            bench.step()
        preempt_all(bench)
        num_tokens = 29 + len(bench.answers[id].tokens)
        begin, fed = len(bench.target.steps), len(bench.drafter.requests)
        for _ in range(3):
            bench.step()
        steps, feeds = bench.target.steps[begin:], bench.drafter.requests[fed:]
        rest = num_tokens - 1 - 21
        assert [(len(s.token_N), len(s.sample_row_R)) for s in steps] == [(21, 0), (rest, 0), (4, 4)]
        assert [(int(f.start_B), len(f.token_M), int(f.num_nodes_B)) for f in feeds] == [(1, 21, 0), (22, rest, 3)]


def test_a_preempted_request_precedes_waiting_ones():
    with bench_of("eagle3", "chain", max_num_seqs=2) as bench:
        first, second, third = (bench.submit([i, 1], 30) for i in range(3))
        bench.step()
        preempt_all(bench)
        assert [r.id for r in bench.engine._waiting] == [first, second, third]
        bench.step()
        assert [r.id for r in bench.engine._running] == [first, second]


# ---- aborts


@pytest.mark.parametrize("is_preempted", [False, True], ids=["running", "preempted"])
@pytest.mark.parametrize(("method", "tree"), SHAPES[:3])
def test_an_abort_at_any_step_frees_its_pages_and_affects_no_other(method, tree, is_preempted):
    other = replace(KINDS["coupled"], prompt=[4, 4])
    with bench_of(method, tree) as bench:
        alone(bench, KINDS["logprobs"])
        num_steps = len(bench.target.steps)
        expected = alone(bench, other)
        for k in range(1, num_steps):
            victim, id = KINDS["logprobs"].submit(bench), other.submit(bench)
            for _ in range(k):
                bench.step()
            if is_preempted:
                for request in bench.engine._running.copy():
                    if request.id == victim:
                        bench.engine.preempt(request)
            bench.abort(victim)
            bench.run()
            bench.ask([1], 1)  # the abort has been taken
            assert bench.answers[id].tokens == [token for chunk in expected for token in chunk.tokens]
            assert bench.num_free == 64 and not (bench.engine._running or bench.engine._waiting or bench.engine._moves)


# ---- too few pages


def test_when_pages_run_out_the_latest_arrival_waits():
    asked = [replace(KINDS["coupled"], max_tokens=60, prompt=[i]) for i in range(4)]
    with bench_of("eagle3", "dynamic") as roomy, bench_of("eagle3", "dynamic", num_pages=22) as tight:
        ids = [a.submit(bench) for bench in (roomy, tight) for a in asked]
        finished: list[int] = []
        roomy.run()
        while tight.open:
            tight.step()
            finished += [chunk.id for chunk in tight.frames[-1].chunks if chunk.finish_reason] if tight.frames else []
        assert [tight.answers[i].tokens for i in ids[:4]] == [roomy.answers[i].tokens for i in ids[:4]]
        stats = tight.frames[-1].stats
        assert stats.num_preemptions > 0 and tight.num_free == 21
        assert roomy.frames[-1].stats.num_preemptions == 0
        assert next(iter(dict.fromkeys(finished))) == 0, "the oldest never waits"


def test_when_pages_run_out_the_least_urgent_waits():
    asked = replace(KINDS["coupled"], max_tokens=60)
    priorities = {0: 3, 1: -(2**63), 2: 0, 3: 2**63 - 1}  # of requests in the order of their arrival
    with bench_of("eagle3", "dynamic", num_pages=22) as tight:
        for number, priority in priorities.items():
            replace(asked, prompt=[number]).submit(tight, priority=priority)
        tight.run()
        told = [chunk for frame in tight.frames for chunk in frame.chunks]
        finished = [chunk.id for chunk in told if chunk.finish_reason]
        assert list(dict.fromkeys(chunk.id for chunk in told)) == finished == [1, 2, 0, 3]
        assert tight.frames[-1].stats.num_preemptions > 0 and tight.num_free == 21


def test_an_urgent_request_overtakes_those_that_wait_and_not_those_that_run():
    with bench_of("eagle3", "chain", max_num_seqs=1) as bench:
        patient, running, second = (bench.submit([1], 30, priority=n, ignore_eos=True) for n in (5, 0, 0))
        bench.step()
        urgent = bench.submit([1], 30, priority=-1)
        bench.step()
        assert [r.id for r in bench.engine._running] == [running]
        assert [r.id for r in bench.engine._waiting] == [urgent, second, patient]


def test_a_preempted_request_returns_before_later_ones_of_its_priority_alone():
    with bench_of("eagle3", "chain", max_num_seqs=1) as bench:
        first, second = (bench.submit([1], 30, priority=2, ignore_eos=True) for _ in range(2))
        bench.step()
        urgent = bench.submit([1], 30, priority=1)
        bench.step()
        preempt_all(bench)
        assert [r.id for r in bench.engine._waiting] == [urgent, first, second]


def test_a_request_that_needs_every_page_runs_alone():
    with bench_of("eagle3", "chain", num_pages=17) as bench:
        for prompt, max_tokens in [([1], 20), ([2], 20), ([1] * 30, 31), ([3], 20)]:
            bench.submit(prompt, max_tokens, ignore_eos=True)  # 30 + 30 + 4 slots: all 16 pages of 4
        bench.run()
        assert [len(answer.tokens) for answer in bench.answers.values()] == [20, 20, 31, 20]
        too_large = bench.ask([1] * 30, 32)
        assert "do not fit" in too_large.last.error and bench.num_free == 16


@pytest.mark.parametrize(
    ("method", "tree", "priorities"),
    [
        (None, "chain", (0,)),
        (None, "chain", (-1, 0, 7)),
        ("eagle3", "dynamic", (0,)),
        ("draft_model", "static", (0,)),
        pytest.param("eagle3", "dynamic", (-1, 0, 7), marks=pytest.mark.full),
    ],
)
def test_many_requests_in_a_tiny_pool_get_what_they_get_alone(method, tree, priorities):
    rng = random.Random(11)
    kinds = list(KINDS.values())
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 60, "eos_token_ids": (5,)}
    with bench_of(method, tree, num_pages=24, **settings) as bench, bench_of(method, tree, **settings) as quiet:
        crowd: dict[int, Asked] = {}
        num_forced = 0
        for _ in range(300):
            if len(bench.open) < 8 and rng.random() < 0.3:
                kind = rng.choice(kinds)
                params = replace(kind.params, seed=rng.getrandbits(64))
                prompt = [rng.randrange(32) for _ in range(rng.choice([1, 2, 7, 20]))]
                more = kind.more | {"ignore_eos": rng.random() < 0.8, "priority": rng.choice(priorities)}
                asked = replace(kind, prompt=prompt, max_tokens=rng.randint(1, 44), params=params, more=more)
                crowd[asked.submit(bench)] = asked
            if bench.open and rng.random() < 0.04:
                bench.abort(rng.choice(sorted(bench.open)))
            if bench.engine._running and rng.random() < 0.05:
                bench.engine.preempt(rng.choice(bench.engine._running))
                num_forced += 1
            if bench.open:
                bench.step()
        bench.run()
        bench.ask([1], 1)  # the last aborts have been taken
        assert bench.num_free == 23 and not (bench.engine._running or bench.engine._waiting or bench.engine._moves)
        finished = [id for id in crowd if bench.answers[id].last is not None]
        for id in finished:
            expected = alone(quiet, crowd[id])
            assert chunks(bench, id) == expected
        assert len(finished) > 30 and bench.frames[-1].stats.num_preemptions > num_forced + 10


# ---- real models

SMALL = {"max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 256}
ENGINES: dict[str, EngineConfig] = {
    "no speculation": bundled(**SMALL),
    "chain": bundled(CHAIN, **SMALL),
    "dynamic": bundled(DYNAMIC, **SMALL),
    "dynamic, draft model": bundled(DYNAMIC, method="draft_model", **SMALL),
    "dynamic, n-gram": replace(
        bundled(**SMALL),
        draft=DraftConfig(method="ngram", model_path="", prompt_lookup_min=1, prompt_lookup_max=3, tree=DYNAMIC),
    ),
}


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name == "dynamic" else pytest.mark.full) for name in ENGINES]
)
def test_a_real_engine_short_of_pages_has_the_same_output(engine):
    """Return texts of many lengths under both rules, which need several times the pages of the small pool."""
    samplings = [
        SamplingSettings(temperature=0.0),
        SamplingSettings(),
        SamplingSettings(temperature=0.8, top_p=0.9, constraints=Constraints(frequency_penalty=0.5)),
    ]
    jobs = [
        GenerationJob(
            prompt=prompt[:100],
            max_tokens=40 + 8 * (i % 5),
            sampling=replace(samplings[i % 3], seed=i),
            speculation=Speculation(acceptance=("coupled", "rejection")[i % 2]),
        )
        for i, prompt in enumerate(prompts(12))
    ]
    answers = []
    for num_pages in (None, 20):
        with Runner(replace(ENGINES[engine], num_pages=num_pages)) as runner:
            answers.append(runner.run(jobs, concurrency=8))
            stats = runner.stats
            assert (stats.num_preemptions > 0) == (num_pages is not None)
            assert stats.num_running == 0 and stats.kv_usage == 0 and stats.requests_finished == len(jobs)
    told = list(zip(jobs, *answers, strict=True))
    is_sampled = [job.speculation.acceptance == "rejection" and job.sampling.temperature > 0 for job in jobs]
    parted = [i for i, (_, one, other) in enumerate(told) if is_sampled[i] and one.tokens != other.tokens]
    assert len(parted) <= 1, "the last bit of a probability may change a sampled draft, but seldom does"
    for i, (_, one, other) in enumerate(told):
        if i not in parted:
            assert one.tokens == other.tokens
            assert one.stats == other.stats
