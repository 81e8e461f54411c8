"""`auto` in an engine on a simulated clock: it drafts where that pays, and comes back when it pays again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.clockwork import AUTO, FIXED, H200, OFF, ClockCosts, bench

torch.set_num_threads(1)

CHEAP_DRAFTS = ClockCosts(fixed=20, row=0.05, message=0.5, fed=0.01, level=1.0, node=0.01)
DEAR_DRAFTS = ClockCosts(fixed=3, row=0.5, message=4, fed=0.05, level=3, node=0.3)
DEAR_ROWS = ClockCosts(fixed=3, row=1.0, message=0.2, fed=0.02, level=0.2, node=0.02)
DEAR_TREES = ClockCosts(fixed=30, row=2.0, message=0.2, fed=0.01, level=0.2, node=0.02, tree=12)


def test_while_nothing_is_drafted_the_drafter_hears_nothing():
    prices = ClockCosts(fixed=1, row=1, message=200, fed=0.01, level=200, node=1)
    with bench(prices) as b:
        b.run(AUTO, 1, 0.0, num_prompts=1, num_tokens=16)
        b.run(AUTO, 1, 0.0, num_prompts=1, num_tokens=64)
        assert len(b.engine._drafter.channel.requests) <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prices", "batch"),
    [(CHEAP_DRAFTS, 1), (DEAR_DRAFTS, 8), (DEAR_ROWS, 1), (DEAR_TREES, 8)],
    ids=["drafts", "no drafts", "rows", "what the table does not tell"],
)
def test_auto_is_as_fast_as_the_better_of_drafting_and_not(prices, batch):
    with bench(prices) as b:
        off, fixed = (b.run(asked, batch, 0.0, num_prompts=batch + 3, num_tokens=32) for asked in (OFF, FIXED))
        b.run(AUTO, batch, 0.0, num_prompts=batch, num_tokens=128)  # learns
        auto = b.run(AUTO, batch, 0.0, num_prompts=batch + 3, num_tokens=32)
    assert auto.tokens == fixed.tokens == off.tokens
    assert auto.rate > 0.95 * max(off.rate, fixed.rate)


def test_auto_verifies_far_fewer_nodes_than_a_full_tree_and_accepts_as_much():
    with bench(ClockCosts(fixed=20, row=0.5, message=0.2, fed=0.01, level=0.2, node=0)) as b:
        b.run(AUTO, 1, 0.0, num_prompts=3, num_tokens=64)  # learns
        fixed, auto = (b.run(asked, 1, 0.0, num_prompts=6, num_tokens=64) for asked in (FIXED, AUTO))
    assert auto.tokens == fixed.tokens and auto.rate > fixed.rate
    assert auto.verified_per_token < 0.8 * fixed.verified_per_token
    assert auto.acceptance_length > 0.93 * fixed.acceptance_length


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 8])
def test_where_drafting_never_pays_probes_take_no_more_than_a_hundredth_of_the_time(batch):
    with bench(DEAR_DRAFTS) as b:
        learning = b.run(AUTO, batch, 0.0, num_prompts=8, num_tokens=64)
        off, auto = (b.run(asked, batch, 0.0, num_prompts=max(24, 5 * batch), num_tokens=64) for asked in (OFF, AUTO))
    assert auto.tokens == off.tokens
    assert auto.rate > 0.98 * off.rate and learning.num_trees + auto.num_trees > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 64])
def test_on_a_gpu_auto_loses_neither_time_per_token_nor_throughput_from_its_first_step_on(batch):
    with bench(H200, max_num_seqs=batch) as b:
        auto, off = (b.run(asked, batch, 0.0, num_prompts=batch, num_tokens=48) for asked in (AUTO, OFF))
    assert auto.tokens == off.tokens
    assert auto.tpot_ms < off.tpot_ms / 0.97 and auto.rate > 0.97 * off.rate


def test_auto_comes_back_when_drafting_pays_again():
    with bench(DEAR_DRAFTS) as b:
        b.run(AUTO, 1, 0.0, num_prompts=4, num_tokens=32)
        assert b.run(AUTO, 1, 0.0, num_prompts=8, num_tokens=32).num_trees < 20
        b.clock.costs = replace(DEAR_DRAFTS, message=0.1, level=0.1, node=0.01)
        b.run(AUTO, 1, 0.0, num_prompts=12, num_tokens=96)
        fast = b.run(AUTO, 1, 0.0, num_prompts=8, num_tokens=32)
    assert fast.num_trees > 40
