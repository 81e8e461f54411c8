"""Every message survives the wire with its values, dtypes and missing parts; values that do not fit raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import oracles
from workers.comm import wire
from workers.config import MAX_TREE_NODES, TreeRules
from workers.types import (
    AttentionMetadata,
    DraftCosts,
    DraftProbs,
    DraftReply,
    DraftRequest,
    SamplingBatch,
    ScoredRows,
    TargetStep,
    TreeBatch,
    TreeTrace,
)

torch.set_num_threads(1)

SMALL = st.integers(0, 4)


def round_trip(message: wire.Message) -> wire.Message:
    packed = wire.pack(message)
    return wire.unpack(packed.kind, packed.meta, packed.bulk)


def assert_equal(got: object, expected: object) -> None:
    """Compare all fields with dtype and shape, weights in half precision and seconds to the microsecond."""
    assert type(got) is type(expected)
    for name in [f.name for f in fields(expected)]:  # type: ignore[arg-type]
        a, b = getattr(got, name), getattr(expected, name)
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape, name
            b = b.half().float() if name in ("weight_N", "weight_T") else b
            assert torch.equal(a, b), name
        elif isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), name
        elif name == "seconds":
            assert a == pytest.approx(b, abs=1e-6)
        elif b is None or isinstance(b, int):
            assert a == b, name
        else:
            assert_equal(a, b)


def ints(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(-(2**31), 2**31, size=shape).astype(np.int32))


def long_ints(rng: np.random.Generator, size: int) -> Tensor:
    return torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, size=size, endpoint=True))


def reals(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def draft_costs(rng: np.random.Generator, size: int) -> DraftCosts:
    return DraftCosts(
        nodes_T=ints(rng, size),
        verify_ms_T=reals(rng, size),
        draft_ms_3=reals(rng, 3),
        base_tokens_1=reals(rng, 1),
        log_odds_D=reals(rng, size),
    )


def tree_trace(rng: np.random.Generator, size: int) -> TreeTrace:
    small = {name: torch.from_numpy(rng.integers(-1, 100, size).astype(np.int32)) for name in ("parent_T", "depth_T")}
    return TreeTrace(
        offsets=ints(rng, 3),
        token_T=ints(rng, size),
        prob_T=reals(rng, size),
        weight_T=reals(rng, size),
        reason_T=torch.from_numpy(rng.integers(0, 4, size).astype(np.uint8)),
        **small,
    )


def draft_reply(
    trees: TreeBatch,
    probs: DraftProbs | None = None,
    *,
    seconds: float = 0.0,
    pruned: Sequence[Sequence[int]] = (),
    trace: TreeTrace | None = None,
) -> DraftReply:
    pruned_GD = torch.tensor(pruned, dtype=torch.int32).reshape(len(pruned), -1 if pruned else 0)
    return DraftReply(
        trees=trees,
        probs=probs,
        pruned_GD=pruned_GD,
        num_levels=len(pruned),
        num_run=7,
        seconds=seconds,
        trace=trace,
    )


def sampling_batch(rng: np.random.Generator, size: int) -> SamplingBatch:
    return SamplingBatch(
        top_k_B=ints(rng, size),
        **{name: reals(rng, size) for name in ("temperature_B", "top_p_B", "min_p_B")},
        seed_B=long_ints(rng, size),
    )


def draft_request(
    seed: int, num: int, rows: int, width: int | None, dtype: torch.dtype = torch.float32
) -> DraftRequest:
    rng = np.random.default_rng(seed)
    return DraftRequest(
        offsets=ints(rng, num + 1),
        token_M=ints(rng, rows),
        page_table_BP=ints(rng, num, seed % 5),
        **{name: ints(rng, num) for name in ("start_B", "rule_B", "auto_B", "num_nodes_B", "max_depth_B")},
        rules=TreeRules().each(lambda _: reals(rng, num)),
        constraints_U=torch.from_numpy(rng.integers(0, 256, size=seed % 7).astype(np.uint8)),
        sampling=sampling_batch(rng, num),
        costs=None if seed % 2 else draft_costs(rng, seed % 4),
        features_MH=None if width is None else reals(rng, rows, width).to(dtype),
        traced_B=ints(rng, num) if seed % 3 else None,
        candidate_MH=reals(rng, rows, width) if width is not None and seed % 4 else None,
    )


def target_step(seed: int, num: int, rows: int, sampled: int, moves: int) -> TargetStep:
    rng = np.random.default_rng(seed)
    return TargetStep(
        copy_source=ints(rng, moves),
        copy_target=ints(rng, moves),
        token_N=ints(rng, rows),
        position_N=ints(rng, rows),
        **{f"{name}_R": ints(rng, sampled) for name in ("sample_row", "request", "draw_index")},
        constraints_U=torch.from_numpy(rng.integers(0, 256, size=seed % 7).astype(np.uint8)),
        attention=AttentionMetadata(
            query_offsets=ints(rng, num + 1).numpy(),
            page_table_BP=ints(rng, num, seed % 5).numpy(),
            base_B=ints(rng, num).numpy(),
            slot_N=ints(rng, rows).numpy(),
            visible_N=ints(rng, rows).numpy(),
            ancestors_N=long_ints(rng, rows).numpy(),
        ),
        sampling=sampling_batch(rng, sampled),
        has_logprobs=bool(seed % 2),
        has_sampled=bool(seed % 3),
        has_draws=bool(seed % 5),
        scored=ScoredRows(**{f"{name}_S": ints(rng, rows) for name in ("row", "token", "num_top")})
        if seed % 4
        else None,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 999), SMALL, st.integers(0, 9), st.none() | st.integers(1, 7),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_draft_requests_survive(seed, num, rows, width, dtype):
    message = draft_request(seed, num, rows, width, dtype)
    assert_equal(round_trip(message), message)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 999), SMALL, st.integers(0, 9), st.integers(0, 9), SMALL)
def test_target_steps_survive(seed, num, rows, sampled, moves):
    message = target_step(seed, num, rows, sampled, moves)
    assert_equal(round_trip(message), message)


@st.composite
def tree_batches(draw) -> TreeBatch:
    sizes = draw(st.lists(st.integers(1, 9), max_size=4))
    each = []
    for size in sizes:
        parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, size)]
        each.append((parents, draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))))
    batch = oracles.trees(each)
    weights = draw(st.lists(st.floats(0, 1, width=32), min_size=sum(sizes), max_size=sum(sizes)))
    return replace(batch, weight_N=torch.tensor(weights, dtype=torch.float32))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tree_batches(),
    st.none() | st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(1, 65535))),
    st.floats(0, 99),
    st.none() | st.integers(0, 9),
)
def test_draft_replies_survive(trees, entries, seconds, traced):
    probs = None
    if entries is not None:
        rows = len(trees.token_N)
        probs = DraftProbs(
            offsets=torch.tensor([0] + [len(entries)] * rows, dtype=torch.int32),
            id_S=torch.tensor([id for id, _ in entries], dtype=torch.int32),
            weight_S=torch.tensor([weight for _, weight in entries], dtype=torch.int32),
        )
    trace = None if traced is None else tree_trace(np.random.default_rng(traced), traced)
    message = draft_reply(trees, probs, seconds=seconds, pruned=[[1, 2]] * (len(trees.offsets) - 1), trace=trace)
    assert_equal(round_trip(message), message)


def test_a_reply_with_an_overflowing_time_survives():
    """Microseconds overflow after 35 minutes, for example when a machine was suspended."""
    arrived = round_trip(draft_reply(oracles.trees([]), seconds=1e4))
    assert arrived.seconds == pytest.approx(2147.483647)


def test_a_reply_without_a_single_tree_survives():
    message = draft_reply(oracles.trees([]))
    assert_equal(round_trip(message), message)


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_the_largest_tree_survives_with_bit_63(shape):
    parents = list(range(-1, MAX_TREE_NODES - 1)) if shape == "chain" else [-1] + [0] * (MAX_TREE_NODES - 1)
    trees = oracles.tree(parents, list(range(MAX_TREE_NODES)))
    assert trees.ancestors_N[-1] < 0
    message = draft_reply(trees)
    assert_equal(round_trip(message), message)


def test_unpacked_messages_do_not_look_into_the_reused_buffer():
    message = target_step(1, 2, 3, 3, 1)
    packed = wire.pack(message)
    got = wire.unpack(packed.kind, packed.meta, packed.bulk)
    packed.meta.zero_()
    assert_equal(got, message)


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [("parent_N", 2**15, torch.int32), ("depth_N", 128, torch.int32), ("depth_N", -129, torch.int32)],
)
def test_a_tree_value_that_does_not_fit_is_refused_by_name(name, value, dtype):
    trees = replace(oracles.tree([-1], [7]), **{name: torch.tensor([value], dtype=dtype)})
    with pytest.raises(OverflowError, match=name):
        wire.pack(draft_reply(trees))


@pytest.mark.parametrize("weight", [65536, -1])
def test_a_draft_weight_that_does_not_fit_is_refused(weight):
    probs = DraftProbs(
        offsets=torch.tensor([0, 1], dtype=torch.int32),
        id_S=torch.tensor([3], dtype=torch.int32),
        weight_S=torch.tensor([weight], dtype=torch.int32),
    )
    with pytest.raises(OverflowError, match="weight_S"):
        wire.pack(draft_reply(oracles.tree([-1], [7]), probs))


@pytest.mark.parametrize("kind", [wire.Kind.STOP, wire.Kind.HEARTBEAT])
def test_bare_frames_carry_no_message(kind):
    with pytest.raises(ValueError, match=kind.name):
        wire.unpack(kind, torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8))
