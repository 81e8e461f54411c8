"""The scheduler: a pure function of waiting and running requests and free pages."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier.prefix_cache import PrefixCache
from verifier.request import Request
from verifier.scheduler import Limits, Step, schedule
from verifier.step_inputs import StepInputs
from verifier.tree import PromptChunk, bare_roots
from workers.comm.ipc import Submit
from workers.kv_cache import PageAllocator, PrefixMatch
from workers.settings import Rule, TreeLimits

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=50, page_size=16)


def request(
    id: int, prompt: int = 10, max_tokens: int = 20, computed: int = 0, output: int = 0, pages: int = 0, nodes: int = 3
) -> Request:
    """Return a request that holds this number of pages; 0 nodes: it never gets drafts."""
    limits = TreeLimits(num_speculative_tokens=nodes) if nodes else None
    made = Request(Submit(id=id, prompt=[1] * prompt, max_tokens=max_tokens), Rule.COUPLED, limits, 1)
    made.num_computed = computed
    made.tokens += [2] * output
    made.pages = array("i", [100 * id + i for i in range(pages)])
    return made


def decoding(id: int, output: int = 1, **more: int) -> Request:
    """A request with a prompt of 10 that has said so many tokens, and holds the pages of its next tree but for some."""
    made = request(id, computed=9 + output, output=output, **more)
    made.pages = made.pages or array("i", [100 * id + i for i in range(LIMITS.pages_for(made))])
    return made


def ids(requests: list[Request]) -> list[int]:
    return [r.id for r in requests]


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


def test_prompts_get_what_requests_under_auto_are_expected_to_leave():
    auto = decoding(1, nodes=16)
    auto.is_auto, waiting = True, request(4, prompt=80)
    assert chunks(schedule([waiting], [auto], 99, LIMITS, auto_rows=2.5)) == [(4, 0, 47)]
    assert chunks(schedule([waiting], [auto], 99, LIMITS, auto_rows=99)) == [(4, 0, 33)]
    auto.is_auto = False
    assert chunks(schedule([waiting], [auto], 99, LIMITS, auto_rows=2.5)) == [(4, 0, 33)]


def test_older_prompts_are_served_before_newer_ones():
    step = schedule([request(3, prompt=30)], [request(1, prompt=20), request(2, prompt=25)], 99, LIMITS)
    assert chunks(step) == [(1, 0, 20), (2, 0, 25), (3, 0, 5)]


def test_a_long_prompt_leaves_half_of_a_step_to_shorter_ones_behind_it():
    long, shorts = request(1, prompt=500), [request(id, prompt=10) for id in (2, 3, 4)]
    step = schedule(shorts[1:], [long, shorts[0]], 99, LIMITS)
    assert chunks(step) == [(1, 0, 30), (2, 0, 10), (3, 0, 10)], "the last one waits for a step"
    assert chunks(schedule([long, *shorts], [], 99, LIMITS)) == chunks(step)


def test_what_shorter_prompts_leave_goes_to_the_long_one():
    long, short = request(1, prompt=500), request(2, prompt=10)
    assert chunks(schedule([short], [long], 99, LIMITS)) == [(1, 0, 40), (2, 0, 10)]
    assert chunks(schedule([short], [long], 0, LIMITS)) == [], "the long one lacks pages itself"
    long.pages = array("i", range(LIMITS.pages_for(long)))
    assert chunks(schedule([short], [long], 0, LIMITS)) == [(1, 0, 50)], "the short one has no pages"


def test_long_prompts_follow_one_another():
    longs, short = [request(id, prompt=500) for id in (1, 2)], request(3, prompt=10)
    step = schedule([longs[1], short], longs[:1], 99, LIMITS)
    assert (chunks(step), step.admitted) == ([(1, 0, 50)], []), "nobody overtakes the second one"


def test_a_step_of_one_page_goes_to_the_first_prompt_whole():
    crowd = [decoding(id) for id in range(13)]
    step = schedule([request(99, prompt=4)], [*crowd, request(98, prompt=500)], 99, replace(LIMITS, max_num_seqs=99))
    assert chunks(step) == [(98, 0, 16)]


# ---- pages


def test_a_request_joins_if_its_prompt_and_one_tree_fit():
    waiting = request(1, prompt=13, max_tokens=500)  # 13 + 4 slots = 2 pages of 16
    assert schedule([waiting], [], 1, LIMITS).is_empty
    step = schedule([waiting], [], 2, LIMITS)
    assert (step.admitted, step.pages) == ([waiting], [(waiting, 2)])


def test_pages_reach_to_the_last_row_of_the_tree_and_no_further():
    assert LIMITS.pages_for(request(1, prompt=12)) == 1 and LIMITS.pages_for(request(1, prompt=13)) == 2
    assert LIMITS.pages_for(request(1, prompt=15, nodes=0)) == 1, "a root alone has one row"
    assert LIMITS.pages_for(request(1, prompt=10, output=3)) == 1, "the root is the last token: 12 + 4 slots"
    assert LIMITS.pages_for(request(1, prompt=10, output=4)) == 2


@given(st.integers(1, 99), st.integers(1, 99), st.integers(0, 63), st.sampled_from([1, 2, 16]))
def test_a_requests_pages_suffice_in_every_step(prompt, max_tokens, nodes, page_size):
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1, page_size=page_size)
    life = limits.pages_for_life(request(1, prompt=prompt, max_tokens=max_tokens))
    assert all(
        limits.pages_for(request(1, prompt=prompt, max_tokens=max_tokens, output=n)) <= life for n in range(max_tokens)
    )


def test_pages_promised_to_one_are_not_promised_to_the_next():
    step = schedule([request(i, prompt=20) for i in range(3)], [], 5, LIMITS)
    assert ids(step.admitted) == [0, 1] and [count for _, count in step.pages] == [2, 2]


def test_a_running_request_takes_a_page_when_its_tree_reaches_into_it():
    inside, beyond = decoding(1, output=3), decoding(2, output=4, pages=1)
    step = schedule([], [inside, beyond], 1, LIMITS)
    assert (step.decode, step.pages, step.preempted) == ([inside, beyond], [(beyond, 1)], [])


def test_a_prompt_holds_its_pages_from_the_first_chunk_on():
    long = request(1, prompt=80, pages=6, computed=50)
    step = schedule([], [long], 0, LIMITS)
    assert (chunks(step), step.pages, step.preempted) == ([(1, 50, 80)], [], [])


def test_the_latest_arrival_is_preempted_when_the_next_trees_do_not_fit():
    old, middle, young = decoding(1, output=4, pages=1), decoding(2), decoding(3)
    step = schedule([], [old, middle, young], 0, LIMITS)
    assert (ids(step.preempted), ids(step.decode), step.pages) == ([3], [1, 2], [(old, 1)])


def test_the_latest_arrival_is_preempted_even_for_its_own_tree():
    old, young = decoding(1), decoding(2, output=4, pages=1)
    step = schedule([], [old, young], 0, LIMITS)
    assert (ids(step.preempted), ids(step.decode), step.pages) == ([2], [1], [])


def test_no_more_requests_are_preempted_than_necessary():
    running = [decoding(i, output=20, pages=1) for i in range(1, 5)]  # 29 + 4 slots: each wants two more pages
    assert ids(schedule([], running, 5, LIMITS).preempted) == [4]
    assert ids(schedule([], running, 4, LIMITS).preempted) == [4, 3]
    assert ids(schedule([], running, 0, LIMITS).preempted) == [4, 3, 2]
    assert ids(schedule([], running, 8, LIMITS).preempted) == []


def test_a_half_computed_prompt_can_be_preempted_too():
    old, young = decoding(1, output=4, pages=1), request(2, prompt=60, pages=4, computed=50)
    step = schedule([], [old, young], 0, LIMITS)
    assert (ids(step.preempted), step.prefill, step.pages) == ([2], [], [(old, 1)])


def test_nobody_joins_in_a_step_that_preempts():
    old, young = decoding(1, output=4, pages=1), request(2, prompt=60, pages=4, computed=50)
    step = schedule([request(3, prompt=1)], [old, young], 0, LIMITS)
    assert (ids(step.preempted), step.admitted) == ([2], [])


def test_a_joining_request_leaves_room_for_the_others_next_trees():
    running = decoding(1, output=3)  # 12 + 4 slots, a full page; if all is accepted the next tree needs another
    assert schedule([request(2)], [running], 1, LIMITS).admitted == []
    assert ids(schedule([request(2)], [running], 2, LIMITS).admitted) == [2]


def test_a_preempted_request_computes_all_but_its_last_token_and_draws_nothing():
    back = request(1, prompt=40, output=31)
    step = schedule([back], [], 99, LIMITS)
    assert (chunks(step), step.finishing, step.pages) == ([(1, 0, 50)], [], [(back, 5)])
    back.num_computed, back.pages = 50, array("i", [1] * 5)
    step = schedule([], [back], 99, LIMITS)
    assert (chunks(step), step.finishing, step.decode) == ([(1, 50, 70)], [], [])
    back.num_computed = 70
    assert schedule([], [back], 99, LIMITS).decode == [back]


def test_a_chunk_that_happens_to_end_with_the_prompt_of_a_preempted_request_draws_nothing():
    step = schedule([request(1, prompt=50, output=9)], [], 99, LIMITS)
    assert (chunks(step), step.finishing) == ([(1, 0, 50)], [])
    assert drawn_rows(step) == []
    step = schedule([request(1, prompt=50)], [], 99, LIMITS)
    assert [r.id for r, _ in step.finishing] == [1]
    assert drawn_rows(step) == [49]


def drawn_rows(step: Step) -> list[int]:
    """Return the packed step's sampled rows, without decoding requests."""
    packed = StepInputs(LIMITS.page_size, ()).target_step(bare_roots([]), [], step.prefill)
    return packed.sample_row_R.tolist()


# ---- shared pages


def finds(pages: list[int], num_held: int):
    return lambda request: PrefixMatch(pages, num_held)


def test_a_request_joins_behind_the_pages_that_it_shares():
    waiting = request(1, prompt=70)  # 70 + 4 slots = 5 pages
    step = schedule([waiting], [], 5, LIMITS, finds([7, 8], 0))
    assert (step.shared, step.pages, chunks(step)) == ([(waiting, [7, 8])], [(waiting, 3)], [(1, 32, 70)])
    assert not waiting.pages and waiting.num_computed == 0


def test_only_pages_that_others_hold_cost_nothing():
    waiting = request(1, prompt=70)
    assert schedule([waiting], [], 4, LIMITS, finds([7, 8], 0)).is_empty, "idle pages are among the four"
    assert schedule([waiting], [], 3, LIMITS, finds([7, 8], 1)).is_empty
    assert schedule([waiting], [], 4, LIMITS, finds([7, 8], 1)).admitted == [waiting]
    assert schedule([waiting], [], 3, LIMITS, finds([7, 8], 2)).admitted == [waiting]


def test_shared_tokens_take_nothing_from_the_token_budget():
    step = schedule([request(1, prompt=70), request(2, prompt=70)], [], 99, LIMITS, finds([7, 8, 9], 3))
    assert chunks(step) == [(1, 48, 70), (2, 48, 70)]


def test_requests_that_cannot_join_are_not_looked_up():
    asked: list[int] = []

    def find(request: Request) -> PrefixMatch:
        asked.append(request.id)
        return PrefixMatch([], 0)

    schedule([request(i) for i in range(3, 9)], [decoding(1), decoding(2)], 99, LIMITS, find)
    assert asked == [3, 4], "two seats"


def test_a_preempted_request_releases_only_unshared_pages():
    old, middle, young = decoding(1, output=20, pages=1), decoding(2, output=20), decoding(3, output=20)
    assert len(middle.pages) == len(young.pages) == 3  # and old wants two more
    assert ids(schedule([], [old, middle, young], 0, LIMITS).preempted) == [3]
    young.pages[:1] = middle.pages[:1]
    assert ids(schedule([], [old, middle, young], 0, LIMITS).preempted) == [3], "two pages are enough"
    young.pages[:2] = middle.pages[:2]
    assert ids(schedule([], [old, middle, young], 0, LIMITS).preempted) == [3, 2], "the first of them gave one page"


# ---- seats and the order of arrival


def test_a_step_tells_whether_requests_wait_for_pages():
    others = [request(i, prompt=20) for i in range(2, 4)]
    assert not schedule(others, [decoding(1)], 99, LIMITS).lacks_pages
    assert schedule(others, [decoding(1)], 3, LIMITS).lacks_pages
    assert schedule([], [decoding(1, pages=1, output=4), decoding(2)], 0, LIMITS).lacks_pages, "one is preempted"
    seated = [decoding(i) for i in range(4)]
    assert not schedule(others, seated, 0, LIMITS).lacks_pages, "they wait for a seat"
    busy = [request(1, prompt=80)]
    longer = [request(2, prompt=60)]
    assert not schedule(longer, busy, 6, LIMITS).lacks_pages, "it waits for the step's tokens"


def test_no_request_overtakes_a_large_one_at_the_head_of_the_queue():
    assert schedule([request(1, prompt=500), request(2)], [], 10, LIMITS).is_empty


def test_at_most_max_num_seqs_requests_run():
    step = schedule([request(i) for i in range(3, 7)], [decoding(1), decoding(2)], 99, LIMITS)
    assert [r.id for r in step.admitted] == [3, 4]


def test_joining_requests_fill_the_token_budget_and_no_more():
    step = schedule([request(i, prompt=20) for i in range(1, 5)], [], 99, LIMITS)
    assert chunks(step) == [(1, 0, 20), (2, 0, 20), (3, 0, 10)]
    assert [r.id for r in step.admitted] == [1, 2, 3]


def test_prompts_advance_by_a_page_even_when_the_trees_alone_exceed_the_budget():
    small = Limits(max_num_seqs=4, max_num_batched_tokens=7, page_size=16)
    running = [decoding(1), decoding(2), request(3)]
    step = schedule([request(4)], running, 99, small)
    assert [r.id for r in step.decode] == [1, 2]
    assert chunks(step) == [(3, 0, 10), (4, 0, 6)]


def test_scheduling_does_not_change_its_arguments():
    waiting, running = [request(4)], [decoding(1), request(2, prompt=80)]
    first = schedule(waiting, running, 99, LIMITS)
    again = schedule(waiting, running, 99, LIMITS)
    assert first == again and [len(waiting), len(running)] == [1, 2] and not waiting[0].pages
    full = [decoding(1, output=4, pages=1), decoding(2)]
    assert schedule(waiting, full, 0, LIMITS).preempted == [full[1]] and len(full) == 2 and len(full[1].pages) == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 64), st.integers(0, 16), st.sampled_from([1, 4, 16]),
    st.integers(8, 60), st.booleans(),
)  # fmt: skip
def test_many_arrivals_end_with_every_page_free(seed, seats, budget, nodes, page_size, pages, is_cached):
    """All prompts are prefixes of one text, so that with a cache all requests share pages."""
    rng = random.Random(seed)
    limits = Limits(max_num_seqs=seats, max_num_batched_tokens=budget, page_size=page_size)
    allocator = PageAllocator(pages + 1)
    prefixes = PrefixCache(allocator, page_size, is_enabled=is_cached)
    waiting: list[Request] = []
    running: list[Request] = []
    num_sent, num_steps, num_left, num_preempted = 0, 0, 0, 0
    to_send = rng.randint(5, 40)

    def let_go(r: Request) -> None:
        prefixes.publish(r, r.num_computed)
        allocator.free(r.pages)
        prefixes.release(r)
        r.forget()

    def leave(r: Request) -> None:
        nonlocal num_left
        (running if r in running else waiting).remove(r)
        let_go(r)
        num_left += 1

    while num_sent < to_send or waiting or running:
        num_steps += 1
        assert num_steps < 20000, "deadlock"
        if num_sent < to_send and rng.random() < 0.4:
            new = request(
                num_sent, prompt=rng.randint(1, 90), max_tokens=rng.randint(1, 40), nodes=rng.randint(0, nodes)
            )
            if limits.pages_for_life(new) <= pages:
                waiting.append(new)
            num_sent += 1
        step = schedule(waiting, running, allocator.num_free, limits, prefixes.find)
        assert not step.is_empty or not (waiting or running), "there is work and nobody does it"

        for r in step.preempted:
            assert r is running.pop() and running, "the last to arrive, never the oldest"
            let_go(r)
            waiting.insert(0, r)
            num_preempted += 1
        assert not (step.preempted and step.admitted)
        for r, found in step.shared:
            assert r is waiting.pop(0)
            running.append(r)
            if found:
                r.share(found, page_size, prefixes.share(r, found))
        for r, count in step.pages:
            assert r in running and count > 0
            r.pages.extend(allocator.alloc(count))
        assert len(running) <= seats
        assert ids(running + waiting) == sorted(ids(running + waiting))
        for r in running:
            assert len(r.pages) == limits.pages_for(r), "what it needs, to the page"
            r.num_fed = r.num_feedable if r.limits else r.num_fed
        holders = Counter(page for r in running for page in r.pages)
        assert all(allocator.num_holders(page) == holders[page] for page in range(pages + 1))
        assert allocator.num_free == pages - len(holders)

        assert step.decode == [r for r in running if r.is_decoding]
        trees = sum(r.tree_rows for r in step.decode)
        assert sum(chunk.stop - chunk.start for _, chunk in step.prefill) <= max(page_size, budget - trees)
        assert not running or running[0] in [*step.decode, *(r for r, _ in step.prefill)], "the oldest advances"
        finishing = [r for r, _ in step.finishing]
        for r, chunk in step.prefill:
            assert chunk == PromptChunk(r.num_computed, chunk.stop) and chunk.start < chunk.stop <= r.root
            r.num_computed = chunk.stop
        for r in finishing:
            assert r.num_computed == r.num_prompt and r.num_output == 0
            r.tokens.append(5)
        for r in step.decode:
            gained = min(rng.randint(1, r.tree_rows), r.submit.max_tokens - r.num_output)
            r.num_computed += gained
            r.tokens += [5] * gained
        for r in list(running):
            prefixes.publish(r, r.num_computed)
            if r.num_output >= r.submit.max_tokens or rng.random() < 0.02:  # finished or aborted
                leave(r)
        if waiting and rng.random() < 0.02:
            leave(rng.choice(waiting))
    assert allocator.num_free == pages
    assert num_preempted <= seats * (num_left + 1), "whoever comes back waited for somebody to leave"


@pytest.mark.parametrize("nodes", [0, 16])
def test_one_request_alone_in_a_tiny_engine_still_finishes(nodes):
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1, page_size=1)
    lonely = request(1, prompt=3, max_tokens=2, nodes=nodes)
    starts = []
    for _ in range(3):
        is_new = not lonely.num_computed
        (_, chunk), *_ = schedule([lonely] * is_new, [lonely] * (not is_new), 99, limits).prefill
        starts.append(chunk.start)
        lonely.num_computed = chunk.stop
    assert starts == [0, 1, 2]
