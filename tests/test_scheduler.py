"""One step's work, decided by a pure function of who waits, who runs and what is free."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier.request import Request
from verifier.scheduler import Limits, Step, schedule
from verifier.tree import Chunk
from workers.ipc import Submit
from workers.kv import PageAllocator
from workers.types import TreeLimits

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=50, tree_rows=4, page_size=16)


def request(id: int, prompt: int = 10, max_tokens: int = 20, computed: int = 0, output: int = 0) -> Request:
    made = Request(Submit(id=id, prompt=[1] * prompt, max_tokens=max_tokens), TreeLimits(num_nodes=3), 1)
    made.num_computed = computed
    made.tokens += [2] * output
    return made


def decoding(id: int, **more: int) -> Request:
    return request(id, computed=10, output=1, **more)


def chunks(step: Step) -> list[tuple[int, int, int]]:
    return [(r.id, chunk.start, chunk.stop) for r, chunk in step.prefill]


def test_nothing_to_do_is_an_empty_step():
    assert schedule([], [], 9, LIMITS).is_empty


def test_a_long_prompt_is_computed_in_chunks_before_its_request_decodes():
    long = request(1, prompt=80)
    step = schedule([long], [], 99, LIMITS)
    assert (step.admitted, step.decode, chunks(step)) == ([long], [], [(1, 0, 50)])
    long.num_computed = 50
    step = schedule([], [long], 99, LIMITS)
    assert (step.admitted, step.decode, chunks(step)) == ([], [], [(1, 50, 80)])
    long.num_computed = 80
    long.tokens.append(7)
    step = schedule([], [long], 99, LIMITS)
    assert (step.decode, step.prefill) == ([long], [])


def test_decoding_requests_go_first_and_prompts_get_what_their_trees_leave():
    running = [decoding(1), request(2, prompt=80), decoding(3)]
    step = schedule([request(4, prompt=80)], running, 99, LIMITS)
    assert [r.id for r in step.decode] == [1, 3]
    assert chunks(step) == [(2, 0, 42)]
    assert step.admitted == []


def test_older_prompts_are_served_before_newer_ones():
    step = schedule([request(3, prompt=30)], [request(1, prompt=20), request(2, prompt=25)], 99, LIMITS)
    assert chunks(step) == [(1, 0, 20), (2, 0, 25), (3, 0, 5)]


def test_a_request_joins_only_if_pages_for_its_whole_life_are_free():
    waiting = request(1, prompt=10, max_tokens=20)  # 10 + 20 + 4 slots = 3 pages of 16
    assert LIMITS.pages_for(waiting) == 3
    assert schedule([waiting], [], 2, LIMITS).is_empty
    assert schedule([waiting], [], 3, LIMITS).admitted == [waiting]


def test_pages_round_up_at_the_last_slot():
    assert LIMITS.pages_for(request(1, prompt=8, max_tokens=20)) == 2
    assert LIMITS.pages_for(request(1, prompt=9, max_tokens=20)) == 3


def test_pages_promised_to_one_are_not_promised_to_the_next():
    step = schedule([request(1), request(2), request(3)], [], 7, LIMITS)
    assert [r.id for r in step.admitted] == [1, 2]


def test_nobody_overtakes_a_large_request_at_the_head_of_the_line():
    assert schedule([request(1, max_tokens=500), request(2)], [], 10, LIMITS).is_empty


def test_there_are_only_so_many_seats():
    step = schedule([request(i) for i in range(3, 7)], [decoding(1), decoding(2)], 99, LIMITS)
    assert [r.id for r in step.admitted] == [3, 4]


def test_joining_requests_fill_the_token_budget_and_no_more():
    step = schedule([request(i, prompt=20) for i in range(1, 5)], [], 99, LIMITS)
    assert chunks(step) == [(1, 0, 20), (2, 0, 20), (3, 0, 10)]
    assert [r.id for r in step.admitted] == [1, 2, 3]


def test_prompts_advance_by_a_page_even_when_the_trees_alone_exceed_the_budget():
    small = Limits(max_num_seqs=4, max_num_batched_tokens=7, tree_rows=4, page_size=16)
    running = [decoding(1), decoding(2), request(3)]
    step = schedule([request(4)], running, 99, small)
    assert [r.id for r in step.decode] == [1, 2]
    assert chunks(step) == [(3, 0, 10), (4, 0, 6)]


def test_scheduling_changes_nothing_it_is_shown():
    waiting, running = [request(4)], [decoding(1), request(2, prompt=80)]
    first = schedule(waiting, running, 99, LIMITS)
    again = schedule(waiting, running, 99, LIMITS)
    assert first == again and [len(waiting), len(running)] == [1, 2] and waiting[0].pages == []


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 64), st.integers(1, 17), st.sampled_from([1, 4, 16]),
    st.integers(8, 60),
)  # fmt: skip
def test_a_long_life_of_arrivals_ends_with_every_page_free_and_nobody_left(
    seed, seats, budget, tree_rows, page_size, pages
):
    rng = random.Random(seed)
    limits = Limits(max_num_seqs=seats, max_num_batched_tokens=budget, tree_rows=tree_rows, page_size=page_size)
    allocator = PageAllocator(pages + 1)
    waiting: list[Request] = []
    running: list[Request] = []
    joined: list[int] = []
    num_sent, num_steps, idle = 0, 0, 0
    to_send = rng.randint(5, 40)
    while num_sent < to_send or waiting or running:
        num_steps += 1
        assert num_steps < 20000, "deadlock"
        if num_sent < to_send and rng.random() < 0.4:
            new = request(num_sent, prompt=rng.randint(1, 90), max_tokens=rng.randint(1, 40))
            if limits.pages_for(new) <= pages:
                waiting.append(new)
            num_sent += 1
        step = schedule(waiting, running, allocator.num_free, limits)
        idle = idle + 1 if step.is_empty and (waiting or running) else 0
        assert idle == 0, "there is work and nobody does it"
        for r in step.admitted:
            assert r is waiting.pop(0)
            r.pages = allocator.alloc(limits.pages_for(r))
            running.append(r)
            joined.append(r.id)
        assert len(running) <= seats
        assert step.decode == [r for r in running if r.is_decoding]
        computed = sum(chunk.stop - chunk.start for _, chunk in step.prefill)
        assert computed <= max(page_size, budget - len(step.decode) * tree_rows)
        for r, chunk in step.prefill:
            assert chunk == Chunk(r.num_computed, chunk.stop) and chunk.start < chunk.stop <= r.num_prompt
            r.num_computed = chunk.stop
            if chunk.stop == r.num_prompt:
                r.tokens.append(5)
        for r in step.decode:
            assert r.num_computed == len(r.tokens) - 1
            assert len(r.tokens) - 1 + tree_rows <= len(r.pages) * page_size, "a tree's rows have a place"
            gained = min(rng.randint(1, tree_rows), r.submit.max_tokens - r.num_output)
            r.num_computed += gained
            r.tokens += [5] * gained
        for r in list(running):
            if r.num_output >= r.submit.max_tokens or (rng.random() < 0.02):  # finished or aborted
                running.remove(r)
                allocator.free(r.pages)
        if waiting and rng.random() < 0.02:
            waiting.pop(rng.randrange(len(waiting)))
    assert allocator.num_free == pages
    assert joined == sorted(joined)


@pytest.mark.parametrize("tree_rows", [1, 17])
def test_one_request_alone_in_a_tiny_engine_still_finishes(tree_rows):
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1, tree_rows=tree_rows, page_size=1)
    lonely = request(1, prompt=3, max_tokens=2)
    starts = []
    for _ in range(3):
        (_, chunk), *_ = schedule([lonely], [], 99, limits).prefill
        starts.append(chunk.start)
        lonely.num_computed = chunk.stop
    assert starts == [0, 1, 2]
