"""Hidden states that wait for the drafter: they are read as kept, and fit with any arrivals and departures."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.fakes import Bench, RandomLanguage
from verifier import hidden_states
from verifier.adaptive.controller import Controller
from verifier.draft_inputs import (
    DraftInput,
    backlog,
    is_due,
    next_input,
    within_message,
)
from verifier.hidden_states import HiddenStateBuffer, HiddenStatePool, max_buffered_states
from verifier.request import Request
from workers import workspace
from workers.comm.ipc import Speculation, Submit
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.settings import Rule, SamplingSettings, TreeLimits
from workers.workspace import max_backlog, max_message_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(6))
def test_kept_states_are_read_unchanged_when_others_leave(seed):
    rng = random.Random(seed)
    pool = HiddenStatePool(200, 3, dtype=torch.float32, device=CPU)
    held: list[tuple[list[int], torch.Tensor]] = []
    for number in range(400):
        count = rng.choice([1, 2, 5, 70])
        if rng.random() < 0.6 and count <= pool.num_free:
            kept = torch.full((count, 3), float(number)) + torch.arange(count)[:, None] / 128
            held.append((pool.store(kept), kept))
        elif held:
            rows, kept = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.3:
                pool.free(rows)
            else:
                assert torch.equal(pool.take(rows), kept)
        own = [row for rows, _ in held for row in rows]
        assert len(set(own)) == len(own) == 200 - pool.num_free
    for rows, kept in held:
        assert torch.equal(pool.take(rows), kept)
    assert pool.num_free == 200


def test_keeping_more_states_than_fit_is_an_assertion_error():
    pool = HiddenStatePool(4, 1, dtype=torch.float32, device=CPU)
    pool.store(torch.zeros(3, 1))
    with pytest.raises(AssertionError, match="pool of hidden states is full"):
        pool.store(torch.zeros(2, 1))


def test_backlog_and_message_limits_follow_the_configuration():
    draft = DraftConfig(method="eagle3", model_path="", tree=TreeConfig(num_speculative_tokens=16))
    config = EngineConfig(model_path="", max_num_seqs=64, max_num_batched_tokens=2048, page_size=16, draft=draft)
    assert (max_backlog(config), max_message_rows(config)) == (256, 2048 + 64)
    assert max_buffered_states(config) == 64 * (256 + 17) + 2 * (2048 + 64)
    many = replace(config, max_num_seqs=1024)
    assert (max_backlog(many), max_message_rows(many)) == (32, 1024 * 17 + 16)
    assert max_buffered_states(many) == 1024 * (32 + 17) + 2 * (1024 * 17 + 16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_waits_fits(seed, monkeypatch):
    """Requests of all lengths come, leave and are preempted, and are drafted for at random or not at all. The engine
    asserts that states find room; `Bench` counts them after every step."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(workspace, "_MAX_BACKLOG", 6)
    share = (0.0, 0.02, 0.2, 0.5)[seed]
    monkeypatch.setattr(Controller, "_choose", lambda self, auto, *_: [r for r in auto if rng.random() < share])
    tree = TreeConfig(kind="dynamic", num_speculative_tokens=3, max_depth=2, prune=PruneConfig(auto=True))
    with Bench(RandomLanguage(error=0.3), "eagle3", tree, 40, max_num_seqs=8, max_num_batched_tokens=20) as b:
        pool = b.target.state_pool
        assert pool is not None
        least = pool.num_free
        for _ in range(20):
            prompt = [int(t) for t in rng.integers(0, 32, rng.integers(1, 90))]
            b.submit(
                prompt, int(rng.integers(1, 40)), SamplingSettings(temperature=0.0),
                speculation=Speculation(auto=bool(rng.random() < 0.8)),
            )  # fmt: skip
            for _ in range(int(rng.integers(0, 6))):
                b.step()
                least = min(least, pool.num_free)
        for token in range(2):  # 80 tokens fit into 39 pages of 4, 200 do not, whoever is drafted for
            b.submit([token] * 40, 60, SamplingSettings(temperature=0.0), ignore_eos=True)
        b.run()
        num_preempted = b.frames[-1].stats.num_preemptions
        assert pool.num_free == max_buffered_states(b.engine._config) > least
    assert num_preempted > 0


def buffer_of(num_rows: int) -> tuple[HiddenStatePool, HiddenStateBuffer]:
    pool = HiddenStatePool(num_rows, 2, dtype=torch.float32, device=CPU)
    return pool, HiddenStateBuffer(pool, lambda rows_by_request, state_NX: None)


def test_states_of_a_leaving_request_are_not_moved():
    pool, buffer = buffer_of(8)
    leaving, staying = _request("leaves", 5), _request("stays", 5)
    buffer.add([(leaving, [0, 2]), (staying, [1])], torch.tensor([[0.0, 0], [1, 1], [2, 2]]))
    buffer.free(leaving)
    assert (buffer.rows_of(leaving), pool.num_free) == ((), 7)
    assert buffer.take({staying: 1}).tolist() == [[1.0, 1.0]]


def test_a_large_prompts_states_are_not_copied_to_be_beside_others(monkeypatch):
    pool, buffer = buffer_of(8)
    monkeypatch.setattr(hidden_states, "_MAX_UNSORTED_ROWS", 4)
    monkeypatch.setattr(hidden_states.torch, "cat", None)
    buffer.add([(_request("decodes", 5), [0])], torch.zeros(1, 2))
    buffer.add([(_request("joins", 8), [0, 1, 2, 3, 4])], torch.zeros(5, 2))
    assert pool.num_free == 2


def test_states_that_are_all_fed_at_once_do_not_go_through_the_pool():
    pool, buffer = buffer_of(8)
    one, other, ends = _request("one", 5), _request("other", 5), _request("ends", 5)
    ends.append([2] * 8)
    states = torch.tensor([[0.0, 0], [1, 1], [2, 2], [3, 3], [4, 4]])
    with mock.patch.object(pool, "store", None):
        for _ in range(2):
            buffer.add([(one, [0, 3]), (ends, [1]), (other, [2])], states)
            assert buffer.take({other: 1, one: 2}).tolist() == [[2.0, 2], [0, 0], [3, 3]]
    assert pool.num_free == 8 and buffer.take({one: 1}) is None
    buffer.add([(one, [0, 3]), (other, [2])], states)
    assert buffer.take({one: 2}).tolist() == [[0.0, 0], [3, 3]], "the other one's wait"
    buffer.add([(one, [1]), (other, [4])], states)
    assert buffer.take({one: 1, other: 1}).tolist() == [[1.0, 1], [2, 2]], "the oldest first"
    assert buffer.take({other: 1}).tolist() == [[4.0, 4]] and pool.num_free == 8


def test_due_inputs_are_fed_first_in_the_same_order():
    """First requests with their own trees, then those over their backlog, then those that can wait."""
    asked = {"waits": 5, "due": 9, "insists": 4, "also due": 8}
    requests = {name: _request(name, count) for name, count in asked.items()}
    asking = {request: DraftInput([1] * asked[name], 3, 2) for name, request in requests.items()}
    for room, sent in [
        (26, {"waits": (5, 3), "due": (9, 3), "insists": (4, 3), "also due": (8, 3)}),
        (23, {"waits": (2, 0), "due": (9, 3), "insists": (4, 3), "also due": (8, 3)}),
        (21, {"due": (9, 3), "insists": (4, 3), "also due": (8, 3)}),
        (15, {"due": (9, 3), "insists": (4, 3), "also due": (2, 0)}),
        (3, {"insists": (3, 0)}),
    ]:
        cut = within_message(asking, max_rows=room, max_backlog=7)
        assert [(requests[name], size) for name, size in sent.items()] == [
            (request, (len(own.tokens), own.num_nodes)) for request, own in cut.items()
        ]


def test_the_row_behind_a_shared_prefix_waits_for_the_rest_of_its_prompt():
    """Before its own tokens are computed, a request could be fed one row, which would cost a message."""
    config = EngineConfig(model_path="", draft=DraftConfig(method="eagle3", model_path="", tree=TreeConfig()))
    request = Request(
        Submit(id=0, prompt=[1] * 40, max_tokens=9), Rule.COUPLED, TreeLimits(num_speculative_tokens=3), 1
    )
    request.num_computed = request.num_fed = 16
    assert next_input(request, config) is None
    request.num_computed = 20
    assert next_input(request, config) == DraftInput([1] * 5, 0, 0)
    request.num_computed = 40
    request.append([2])
    assert next_input(request, config) == DraftInput([1] * 24 + [2], 3, 7)
    request.append([2] * 7)
    request.num_computed = 47
    assert next_input(request, config) is None, "one more token ends the answer"


def test_a_request_is_due_when_its_backlog_exceeds_the_limit():
    assert [is_due(_request("waits", count), 7) for count in (6, 7, 8)] == [False, False, True]
    prompt = _request("waits", 5)
    prompt.feed_first = 16
    assert not is_due(prompt, 7), "its prompt is still being computed"
    prompt.num_computed = prompt.num_prompt
    prompt.append([2])
    assert is_due(prompt, 7)
    prompt.num_fed = 16
    assert not is_due(prompt, 7), "the pages that others may share have been fed"
    behind = _request("waits", 12)
    behind.num_computed = 14
    assert backlog(behind) == 7 and not is_due(behind, 7), "what is not computed cannot be fed"


def test_states_are_kept_only_for_requests_that_may_get_drafts():
    pool, buffer = buffer_of(8)
    ends, goes_on = _request("ends", 5), _request("goes on", 5)
    plain = Request(Submit(id=0, prompt=[1] * 20, max_tokens=9), Rule.COUPLED, None, 0)
    ends.append([2] * 8)
    buffer.add([(ends, [0]), (plain, [1]), (goes_on, [2])], torch.tensor([[0.0, 0], [1, 1], [2, 2]]))
    buffer.flush()
    assert pool.num_free == 7
    assert not buffer.rows_of(ends) and not buffer.rows_of(plain)
    assert buffer.take({goes_on: 1}).tolist() == [[2.0, 2.0]]


def test_small_steps_add_up_to_what_may_be_in_memory_uncounted(monkeypatch):
    pool, buffer = buffer_of(8)
    monkeypatch.setattr(hidden_states, "_MAX_UNSORTED_ROWS", 4)
    request = _request("decodes", 8)
    for _ in range(2):
        buffer.add([(request, [0, 1])], torch.zeros(2, 2))
    assert pool.num_free == 8
    buffer.add([(request, [0])], torch.zeros(1, 2))
    assert pool.num_free == 4, "the first two steps' states were put where they belong"


def _request(name: str, count: int) -> Request:
    limits = TreeLimits(num_speculative_tokens=3, auto=name != "insists", min_prob=0.0, path_prob=0.0)
    request = Request(Submit(id=0, prompt=[1] * 20, max_tokens=9), Rule.COUPLED, limits, 0)
    request.num_computed, request.num_fed = 19, 20 - count
    return request
