"""Log-probabilities of prompt tokens: each once and in order, whatever is shared, cut into chunks or computed again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import verifier.target
from tests.support.fakes import Bench, RandomLanguage, say
from verifier.target import token_logprobs
from workers.comm.ipc import TokenLogprobs
from workers.models.load import load_decoder
from workers.settings import SamplingSettings

torch.set_num_threads(1)

LANGUAGE = RandomLanguage()
PROMPT = [i * 5 % 31 for i in range(29)]
SEEDED = SamplingSettings(seed=3)


def wanted(prompt: list[int], num_top: int) -> list[TokenLogprobs]:
    rows = [torch.from_numpy(LANGUAGE.target(prompt[:end])) for end in range(1, len(prompt))]
    return token_logprobs(torch.stack(rows), prompt[1:], [num_top] * len(rows)) if rows else []


def told(bench: Bench, id: int) -> list[TokenLogprobs]:
    return [score for chunk in bench.answers[id].chunks for score in chunk.prompt_logprobs or ()]


def assert_same(got: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(got) == len(expected)
    for mine, other in zip(got, expected, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5) and mine.rank == other.rank
        assert [id for id, _ in mine.top] == [id for id, _ in other.top]


def bench_of(method: Any = None, **settings: Any) -> Bench:
    return Bench(LANGUAGE, method, **{"max_num_batched_tokens": 11} | settings)


@pytest.mark.parametrize("method", [None, "eagle3", "draft_model"])
def test_every_prompt_token_but_the_first_is_scored_once(method: Any) -> None:
    with bench_of(method) as bench:
        asked = [(PROMPT, 2), (PROMPT[:1], 1), (PROMPT[3:20], 0), (PROMPT[:12], None)]
        ids = [bench.submit(prompt, 9, SEEDED, num_prompt_logprobs=num) for prompt, num in asked]
        bench.run()
        for id, (prompt, num) in zip(ids, asked, strict=True):
            assert_same(told(bench, id), wanted(prompt, num) if num is not None else [])
            assert bench.answers[id].tokens == say(LANGUAGE, prompt, 9, SEEDED)
            assert all(len(score.top) == num for score in told(bench, id))
        assert len([chunk for chunk in bench.answers[ids[0]].chunks if chunk.prompt_logprobs]) > 2


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_cached_pages_are_not_shared_where_their_logits_are_needed(method: Any) -> None:
    with bench_of(method) as bench:
        for num, is_cached in ((None, False), (None, True), (1, False), (None, True)):
            answer = bench.ask(PROMPT, 5, SEEDED, num_prompt_logprobs=num)
            assert answer.last is not None and (answer.last.num_cached_tokens > 0) == is_cached
            assert answer.tokens == say(LANGUAGE, PROMPT, 5, SEEDED)
        assert_same(told(bench, 2), wanted(PROMPT, 1))


@pytest.mark.parametrize("method", [None, "eagle3"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_preemption_repeats_and_loses_no_score(method: Any, caching: bool, seed: int) -> None:
    rng = random.Random(seed)
    with bench_of(method, enable_prefix_caching=caching) as bench:
        ids = [bench.submit(PROMPT, 6, SEEDED, num_prompt_logprobs=1) for _ in range(3)]
        other = bench.submit(PROMPT[:20], 6, SEEDED)
        while bench.open:
            bench.step()
            if bench.engine._running and rng.random() < 0.4 and bench.engine._stats.num_preemptions < 30:
                bench.engine.preempt(bench.engine._running[-1])
        assert bench.engine._stats.num_preemptions >= 2
        for id in ids:
            assert_same(told(bench, id), wanted(PROMPT, 1))
            assert bench.answers[id].tokens == say(LANGUAGE, PROMPT, 6, SEEDED)
        assert told(bench, other) == []


def test_scored_positions_are_shared_again_after_a_preemption() -> None:
    with bench_of() as bench:
        id = bench.submit(PROMPT, 6, SEEDED, num_prompt_logprobs=1)
        bench.step()
        bench.step()
        [request] = bench.engine._running
        assert request.num_scored == 22
        bench.engine.preempt(request)
        bench.step()
        assert bench.target.steps[-1].position_N.tolist()[0] == 20  # five pages of four
        bench.run()
        assert_same(told(bench, id), wanted(PROMPT, 1))


def test_a_step_scores_a_limited_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_of(max_num_batched_tokens=100) as bench:
        bench.engine._limits = bench.engine._limits.__class__(
            max_num_seqs=8, max_num_batched_tokens=100, page_size=4, max_scored_rows=10
        )
        ids = [bench.submit(PROMPT, 3, SEEDED, num_prompt_logprobs=1) for _ in range(2)]
        plain = bench.submit(PROMPT, 3, SEEDED)
        bench.run()
        sizes = [len(step.scored.row_S) for step in bench.target.steps if step.scored is not None]
        assert max(sizes) == 14 and sum(sizes) == 2 * 28  # ten, and a page for the second request
        for id in ids:
            assert_same(told(bench, id), wanted(PROMPT, 1))
        assert bench.answers[plain].tokens == say(LANGUAGE, PROMPT, 3, SEEDED)


@pytest.mark.slow
def test_the_logits_of_a_long_prompt_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.engines import BUNDLED, bundled
    from verifier.target import Target
    from workers.models.readers import read_spec
    from workers.types import ScoredRows

    decoder = load_decoder(BUNDLED / "target", read_spec(BUNDLED / "target"))
    target = Target(decoder, decoder.new_kv_pool(16), bundled().page_size, None, None)
    sizes, logits = [], decoder.logits

    def counted(hidden_ND: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_ND))
        return logits(hidden_ND)

    monkeypatch.setattr(decoder, "logits", counted)
    monkeypatch.setattr(verifier.target, "SCORED_ROWS", 8)
    hidden_ND = torch.randn(30, decoder.spec.hidden_size)
    row_S = torch.arange(29, 4, -1, dtype=torch.int32)
    num_top_S = torch.arange(25, dtype=torch.int32) % 4
    scores = target._score(hidden_ND, ScoredRows(row_S=row_S, token_S=row_S + 7, num_top_S=num_top_S))
    assert sizes == [8, 8, 8, 1]
    logp_NV = logits(hidden_ND).log_softmax(-1)
    for row, num, score in zip(row_S.tolist(), num_top_S.tolist(), scores, strict=True):
        assert score.logprob == pytest.approx(float(logp_NV[row, row + 7]), abs=1e-5)
        assert [id for id, _ in score.top] == logp_NV[row].topk(num).indices.tolist()
