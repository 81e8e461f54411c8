"""The gated delta rule over a tree equals the recurrence along each node's path, in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.attention_cases import paths_of
from workers.kernels.torch_delta import MOST_PIECES, delta_plan, delta_rule
from workers.types import AttentionMetadata

torch.set_num_threads(1)

SHAPES = {
    "chain": lambda rng, row: row - 1,
    "random": lambda rng, row: rng.randrange(row),
    "deep": lambda rng, row: max(0, row - 1 - (rng.random() < 0.6) * rng.randrange(3)),
    "binary": lambda rng, row: (row - 1) // 2,
    "star": lambda rng, row: 0,
}
GATES = {"slow": 0.01, "usual": 1.0, "strong": 100.0}


class Case:
    """Trees of one size with random inputs, float64. nearness: of all keys to one another."""

    def __init__(
        self, seed: int, parents: list[list[int]], heads: tuple[int, int], gate: float, nearness: float
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        (K, H), B, R, d, v = heads, len(parents), len(parents[0]), 16, 32

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        keys = normal(B, R, K, d) * (1 - nearness) + normal(B, 1, K, d) * nearness
        self.parents = parents
        self.q, self.k = (x / x.norm(dim=-1, keepdim=True) for x in (normal(B, R, K, d), keys))
        self.v, self.beta = normal(B, R, H, v), normal(B, R, H).sigmoid()
        self.g = -gate * normal(B, R, H).abs()
        self.state = normal(B, H, d, v)
        self.last_B = torch.randint(R, (B,), generator=generator)
        self.path = torch.zeros(B, R, R, dtype=torch.bool)
        for b, own in enumerate(parents):
            for row, path in enumerate(paths_of(own)):
                self.path[b, row, path] = True

    def run(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs = [x.to(dtype) for x in (self.q, self.k, self.v, self.beta, self.g)]
        out, behind = delta_rule(*inputs, self.path, self.state.to(dtype), self.last_B)
        assert behind is not None and out.dtype == behind.dtype == dtype
        return out.double(), behind.double()

    def recurrence(self) -> tuple[Tensor, Tensor]:
        """Return each node's output, and the state behind the last row, one token at a time along its path."""
        ratio = self.v.shape[2] // self.k.shape[2]
        q, k = (x.repeat_interleave(ratio, dim=2) for x in (self.q, self.k))
        outs = torch.zeros_like(self.v)
        states = torch.zeros(len(self.parents), len(self.parents[0]), *self.state.shape[1:], dtype=torch.float64)
        for b, parents in enumerate(self.parents):
            for row, parent in enumerate(parents):
                state = (self.state[b] if parent < 0 else states[b, parent]) * self.g[b, row].exp()[:, None, None]
                key = k[b, row][:, :, None]
                u = self.beta[b, row][:, None] * (self.v[b, row] - (key * state).sum(1))
                states[b, row] = state + key * u[:, None]
                outs[b, row] = (q[b, row][:, :, None] * states[b, row]).sum(1)
        return outs, states[torch.arange(len(states)), self.last_B]


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.isfinite().all()
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_has_the_output_and_the_state_of_its_path(shape: str, gate: str) -> None:
    rng = random.Random(7)
    for seed, rows in enumerate((1, 2, 3, 8, 17, 33, 64)):
        parents = [[-1, *(SHAPES[shape](rng, row) for row in range(1, rows))] for _ in range(3)]
        heads = rng.choice([(1, 1), (2, 2), (2, 6), (1, 4)])
        case = Case(seed, parents, heads, GATES[gate], nearness=0.97 * (seed % 2))
        expected = case.recurrence()
        for actual, wanted in zip(case.run(torch.float64), expected, strict=True):
            assert error(actual, wanted) < 1e-12
        for actual, wanted in zip(case.run(torch.float32), expected, strict=True):
            assert error(actual, wanted) < 1e-5


def metadata(sizes: list[int], masks: list[int], read: list[int], write: list[int]) -> AttentionMetadata:
    none = np.zeros(sum(sizes), dtype=np.int32)
    return AttentionMetadata(
        query_offsets=np.cumsum([0, *sizes]).astype(np.int32),
        page_table_BP=np.zeros((len(sizes), 1), dtype=np.int32),
        base_B=np.zeros(len(sizes), dtype=np.int32),
        slot_N=none,
        visible_N=none,
        ancestors_N=np.array(masks, dtype=np.uint64).view(np.int64),
        read_seat_B=np.array(read, dtype=np.int32),
        write_seat_B=np.array(write, dtype=np.int32),
    )


def test_a_convolution_sees_the_last_inputs_and_then_a_nodes_own_path() -> None:
    """Requests: root - (a, b), a - c, c - d; a bare root; a first chunk of two rows."""
    trees = [0b1, 0b11, 0b101, 0b1011, 0b11011]
    plan = delta_plan(metadata([5, 1, 2], [*trees, 0, 0, 0], [4, 2, 0], [0, 0, 7]))
    past = [["x0", "x1", "x2"], ["y0", "y1", "y2"], ["00", "01", "02"]]
    rows = [*past[0], *past[1], *past[2], "root", "a", "b", "c", "d", "bare", "first", "second"]
    assert [[rows[i] for i in window] for window in plan.window_CN.T.tolist()] == [
        ["x0", "x1", "x2", "root"],
        ["x1", "x2", "root", "a"],
        ["x1", "x2", "root", "b"],
        ["x2", "root", "a", "c"],
        ["root", "a", "c", "d"],
        ["y0", "y1", "y2", "bare"],
        ["00", "01", "02", "first"],
        ["01", "02", "first", "second"],
    ]
    assert (plan.num_tree_rows, plan.read_B.tolist(), plan.write_W.tolist()) == (6, [4, 2, 0], [7])
    assert [rows[i] for i in plan.tail_W3[0].tolist()] == ["02", "first", "second"]


def test_a_long_chunk_is_cut_into_pieces_that_follow_one_another() -> None:
    sizes = [1] * (MOST_PIECES + 3) + [130, 64, 3]
    read = [*range(1, MOST_PIECES + 4), 0, 50, 51]
    write = [0] * (MOST_PIECES + 3) + [49, 50, 51]
    plan = delta_plan(metadata(sizes, [0] * sum(sizes), read, write))
    told = [
        (tuple(own.path_BRR.shape[:2]), own.read_B.tolist(), None if own.write_B is None else own.write_B.tolist())
        for own in plan.pieces
    ]
    assert told == [
        ((MOST_PIECES, 1), read[:MOST_PIECES], None),
        ((3, 1), read[MOST_PIECES : MOST_PIECES + 3], None),
        ((1, 3), [51], [51]),
        ((2, 64), [0, 50], [49, 50]),
        ((1, 64), [49], [49]),
        ((1, 2), [49], [49]),
    ]
    rows = torch.cat([pieces.row_P for pieces in plan.pieces])
    assert rows[plan.order_N].tolist() == list(range(sum(sizes)))


def test_a_piece_ends_where_a_state_is_kept() -> None:
    """States are kept behind rows 69 and 99, the last, of the first chunk, and behind the first row of the second."""
    chunks = replace(
        metadata([100, 3], [0] * 103, [0, 7], [5, 7]),
        keep_row_K=np.array([69, 99, 100]),
        keep_seat_K=np.array([8, 9, 10]),
    )
    plan = delta_plan(chunks)
    told = {}
    for own in plan.pieces:
        assert own.write_B is not None
        kept = dict(zip(own.kept_K.tolist(), own.keep_K.tolist(), strict=True)) if own.kept_K is not None else {}
        rows_BR = own.row_P.view(own.path_BRR.shape[:2])
        for b, (rows, last, seat) in enumerate(zip(rows_BR, own.last_B, own.write_B.tolist(), strict=True)):
            told[int(rows[0]), int(rows[last])] = (seat, kept.get(b))
    assert told == {(0, 63): (5, None), (64, 69): (5, 8), (70, 99): (5, 9), (100, 100): (7, 10), (101, 102): (7, None)}
    tails = dict(zip(plan.write_W.tolist(), plan.tail_W3.tolist(), strict=True))
    assert {seat: rows[-1] - 6 for seat, rows in tails.items()} == {5: 99, 7: 102, 8: 69, 9: 99, 10: 100}
    assert tails[10] == [4, 5, 106] and tails[8] == [73, 74, 75]
