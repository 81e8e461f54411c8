"""The logits-processor state counts tokens as far as penalties need them, and survives serialization."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.sampling.test_logits_processors import ASKED, logits_state
from workers.sampling.logits_state import TokenCounter, pack_logits_states, unpack_logits_states
from workers.settings import Constraints


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9)), st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=9))
def test_a_token_counter_counts_what_the_penalties_need(prompt, steps):
    repetition, frequency, neither = (
        TokenCounter(constraints, prompt)
        for constraints in (Constraints(repetition_penalty=1.1), Constraints(frequency_penalty=1), Constraints())
    )
    output: list[int] = []
    for tokens in [[], *steps]:
        output += tokens
        for counter, expected in (
            (repetition, dict.fromkeys(prompt, 0) | Counter(output)),
            (frequency, Counter(output)),
            (neither, {}),
        ):
            counter.add(tokens)
            counts = counter.counts()
            assert list(zip(counts.id_C.tolist(), counts.count_C.tolist(), strict=True)) == sorted(expected.items())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.none() | ASKED, max_size=4))
def test_logits_states_survive_the_wire(requests):
    logits_states = [asked and asked.logits_state for asked in requests]
    packed_U = pack_logits_states(logits_states)
    assert packed_U.dtype == torch.uint8 and packed_U.ndim == 1
    assert unpack_logits_states(packed_U) == {i: s for i, s in enumerate(logits_states) if s is not None}


def test_unconstrained_requests_put_nothing_on_the_wire():
    assert len(pack_logits_states([])) == len(pack_logits_states([None, None])) == 0
    assert unpack_logits_states(torch.empty(0, dtype=torch.uint8)) == {}


def test_fields_keep_their_types():
    state = logits_state(Constraints(logit_bias={7: 2}, min_tokens=3, repetition_penalty=1.1), (1, 2), (2,), ends=[4])
    (arrived,) = unpack_logits_states(pack_logits_states([state])).values()
    assert arrived.constraints.allowed_token_ids is None
    assert arrived.counts.id_C.tolist() == [1, 2] and arrived.counts.count_C.tolist() == [0, 1]
    assert [type(x) for x in arrived.constraints.logit_bias] == [int]


def test_unsupported_types_are_an_error():
    state = replace(logits_state(Constraints(min_tokens=1), (), ()), tail=[np.int64(3)])
    with pytest.raises((TypeError, ValueError, msgpack.PackException)):
        pack_logits_states([state])
