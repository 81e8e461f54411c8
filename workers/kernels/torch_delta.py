"""The gated delta rule over trees and prompt chunks, in plain torch.

    S <- e^g S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q                a token, per value head

Rows that are the nodes of a tree, or a chain, go through it at once. With A[i, j] = 1 where row j is an ancestor of row
i or i itself, and S0 the state before the first row:

    G = A g                                          the sum of the log gates along each row's path
    D[i, j] = e^(G_i - G_j) where A[i, j], else 0
    (I + L) U = beta (V - e^G (K S0))                L = beta (K K^T) D below the diagonal: a triangular solve
    O = e^G (Q S0) + ((Q K^T) D) U
    S_e = e^(G_e) S0 + sum_j D[e, j] k_j u_j^T       the state behind row e

L connects a row with its ancestors alone, so each row has the result of its own path, and rows off the path to e do not
enter S_e. A chain is the tree whose A is lower triangular. (I + L)^-1 by repeated squaring would lose all accuracy
where keys are nearly equal.

Legend: N packed rows, B pieces that run at once, R rows of a piece (padded to the most), H value heads, K key heads, a
divisor of H, d key width, v value width. A piece is a tree, or up to 64 rows of a prompt chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.host import bits_of, highest_bit
from workers.transfer import to_device
from workers.types import AttentionMetadata, Folds

PIECE_ROWS = 64
MOST_PIECES = 32
"""Pieces that run at once: each has two copies of its state."""
CONV_ROWS = 4
"""Rows of a path that the convolution sees: the row itself and the three before it."""


class DeltaWeights(NamedTuple):
    """The weights by which one layer mixes rows, on one rank."""

    conv_4C: Tensor  # float32, from the third row before to the row itself
    decay_H: Tensor  # float32, -e^A_log
    dt_bias_H: Tensor  # float32
    num_keys: int  # K


class LayerStates(NamedTuple):
    """One layer's part of a `workers.kv_cache.StatePool`, in views."""

    state_SHdv: Tensor  # float32, by seat
    inputs_S3C: Tensor
    stash_XY: Tensor  # [X, C + 2 H]

    @property
    def stash_parts(self) -> tuple[Tensor, Tensor]:
        """Stashed rows of q, k and v, [X, C], and of b and a, [X, 2 H]."""
        C = self.inputs_S3C.shape[2]
        return self.stash_XY[:, :C], self.stash_XY[:, C:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Pieces of similar size that run at once."""

    row_P: Tensor  # [B*R] packed rows; padding repeats a piece's last row
    path_BRR: Tensor  # bool, A; padding sees itself alone
    last_B: Tensor  # int64, each piece's last row among its R
    read_B: Tensor  # int64, the seat of its state
    write_B: Tensor | None  # int64, the seat that takes the state behind the last row; None = the rows are of trees
    kept_K: Tensor | None  # int64, those of the B pieces whose last state is kept, too; None = none
    keep_K: Tensor | None  # int64, the seats for them


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecedPlan:
    """One step of the gated delta layers. Rows of the convolution index [3 inputs of each request; N packed rows]."""

    num_tree_rows: int  # the leading rows
    pieces: tuple[Pieces, ...]  # one after the other
    order_N: Tensor  # position of row n in the pieces' concatenated outputs
    read_B: Tensor  # int64, each request's seat, whose inputs precede its first row
    window_CN: Tensor  # [4, N] rows of the convolution, from the third ancestor to the row itself
    write_W: Tensor  # int64, seats of the requests that are not trees, and of states that are kept
    tail_W3: Tensor  # the last inputs before these states, as rows of the convolution


class _Piece(NamedTuple):
    """Rows begin .. begin + num_rows - 1 of a request, the turn-th piece of it."""

    turn: int
    request: int
    begin: int
    num_rows: int
    is_written: bool
    keep: int  # the seat where the state behind it is kept, too; 0 = none

    @property
    def kind(self) -> tuple[int, bool, int]:
        """Return what pieces that run at once have in common; the size up to a factor of 4, because of the padding."""
        return self.turn, self.is_written, (self.num_rows - 1).bit_length() + 1 >> 1


def conv_rows(metadata: AttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows [4, N] that each row's convolution mixes, itself last, and the row before each [3 B + N].

    Rows index the three inputs that each request begins with, and behind those the packed rows.
    """
    offsets, ancestors_N = metadata.query_offsets, metadata.ancestors_N
    num_rows, num_requests = len(ancestors_N), metadata.num_requests
    first_N = offsets[:-1].repeat(np.diff(offsets))
    row_N = np.arange(num_rows) - first_N
    above_N = ancestors_N & ~(np.int64(1) << np.minimum(row_N, 63))
    parent_N = np.where(ancestors_N == 0, row_N, highest_bit(above_N)) - 1  # within the request; -1 = none
    before = np.empty(3 * num_requests + num_rows, dtype=np.int64)  # rows of the convolution
    before[: 3 * num_requests] = np.arange(3 * num_requests) - 1
    before[3 * num_requests :] = np.where(parent_N < 0, 3 * metadata.owner_N + 2, 3 * num_requests + first_N + parent_N)
    window = [np.arange(3 * num_requests, len(before))]
    for _ in range(CONV_ROWS - 1):
        window.insert(0, before[window[0]])
    return np.stack(window), before


def delta_plan(metadata: AttentionMetadata, device: torch.device | str = "cpu", into: object = None) -> PiecedPlan:
    """See `workers.kernels.select.Kernels.delta_plan`."""
    offsets, ancestors_N = metadata.query_offsets, metadata.ancestors_N
    read_B, write_B = metadata.read_seat_B, metadata.write_seat_B
    num_rows, num_requests = len(ancestors_N), metadata.num_requests
    window_CN, before = conv_rows(metadata)
    written = np.flatnonzero((write_B > 0) & (np.diff(offsets) > 0))
    last_W = np.concatenate([offsets[written + 1] - 1, metadata.keep_row_K])
    tail = [last_W.astype(np.int64) + 3 * num_requests]
    for _ in range(CONV_ROWS - 2):
        tail.insert(0, before[tail[0]])

    pieces, order_N, end = [], np.empty(num_rows, dtype=np.int64), 0
    kept = dict(zip((metadata.keep_row_K + 1).tolist(), metadata.keep_seat_K.tolist(), strict=True))
    for group in _groups(offsets.tolist(), write_B.tolist(), kept):
        request_B, begin_B, count_B = (np.array(column) for column in list(zip(*group, strict=True))[1:4])
        R = int(count_B.max())
        row_BR = begin_B[:, None] + np.minimum(np.arange(R), count_B[:, None] - 1)
        is_real_BR = np.arange(R) < count_B[:, None]
        chain_R = (np.int64(2) << np.arange(R)) - 1
        path_BR = np.where(ancestors_N[row_BR] == 0, chain_R, ancestors_N[row_BR])
        path_BR = np.where(is_real_BR, path_BR, np.int64(1) << np.arange(R))
        order_N[row_BR[is_real_BR]] = end + np.flatnonzero(is_real_BR)
        end += row_BR.size
        is_first_B, is_written = begin_B == offsets[request_B], group[0].is_written
        keep_B = np.array([piece.keep for piece in group])
        (kept_K,) = keep_B.nonzero()
        pieces.append(
            Pieces(
                row_P=to_device(row_BR.reshape(-1), device),
                path_BRR=to_device(bits_of(path_BR)[..., :R].astype(bool), device),
                last_B=to_device(count_B - 1, device),
                read_B=to_device(np.where(is_first_B, read_B[request_B], write_B[request_B]).astype(np.int64), device),
                write_B=to_device(write_B[request_B].astype(np.int64), device) if is_written else None,
                kept_K=to_device(kept_K, device) if len(kept_K) else None,
                keep_K=to_device(keep_B[kept_K], device) if len(kept_K) else None,
            )
        )
    return PiecedPlan(
        num_tree_rows=int(np.diff(offsets)[write_B == 0].sum()),
        pieces=tuple(pieces),
        order_N=to_device(order_N, device),
        read_B=to_device(read_B.astype(np.int64), device),
        window_CN=to_device(window_CN, device),
        write_W=to_device(np.concatenate([write_B[written], metadata.keep_seat_K]).astype(np.int64), device),
        tail_W3=to_device(np.stack(tail, axis=1), device),
    )


def chains(folds: Folds) -> AttentionMetadata:
    """Return accepted paths as chains that go on from the state of their seat and leave the next one there."""
    offsets, seat_F = folds.offsets.numpy(), folds.seat_F.numpy()
    none = np.zeros(offsets[-1], dtype=np.int32)
    return AttentionMetadata(
        query_offsets=offsets,
        page_table_BP=np.zeros((len(seat_F), 1), dtype=np.int32),
        base_B=np.zeros_like(seat_F),
        slot_N=none,
        visible_N=none,
        ancestors_N=none.astype(np.int64),
        read_seat_B=seat_F,
        write_seat_B=seat_F,
        keep_row_K=folds.keep_row_K.numpy(),
        keep_seat_K=folds.keep_seat_K.numpy(),
    )


def _groups(offsets: list[int], write: list[int], kept: dict[int, int]) -> Iterator[list[_Piece]]:
    """Yield the pieces that run at once. The pieces of one request follow one another.

    kept: the seats that keep states, by the row after each; a piece ends there.
    """
    pieces = []
    for request, (seat, (first, end)) in enumerate(zip(write, pairwise(offsets), strict=True)):
        cuts = [first, *sorted(row for row in kept if first < row < end), end]
        begins = [begin for a, b in pairwise(cuts) for begin in range(a, b, PIECE_ROWS)]
        for turn, (begin, stop) in enumerate(pairwise([*begins, end])):
            pieces.append(_Piece(turn, request, begin, stop - begin, seat > 0, kept.get(stop, 0)))
    pieces.sort(key=lambda piece: piece.kind)
    for _, of_kind in groupby(pieces, key=lambda piece: piece.kind):
        group = list(of_kind)
        yield from (group[i : i + MOST_PIECES] for i in range(0, len(group), MOST_PIECES))


def delta_net(qkv_NC: Tensor, ba_N2H: Tensor, weights: DeltaWeights, plan: PiecedPlan, layer: LayerStates) -> Tensor:
    """See `workers.kernels.select.Kernels.delta_net`."""
    room_XY = layer.stash_XY[: plan.num_tree_rows]
    torch.cat((qkv_NC[: len(room_XY)], ba_N2H[: len(room_XY)]), dim=1, out=room_XY)
    out_NHv = _advance(qkv_NC, ba_N2H, weights, plan, layer, has_outputs=True)
    assert out_NHv is not None
    return out_NHv


def delta_fold(row_A: Tensor, weights: DeltaWeights, plan: PiecedPlan, layer: LayerStates) -> None:
    """See `workers.kernels.select.Kernels.delta_fold`."""
    qkv_AC, ba_A2H = (rows.index_select(0, row_A) for rows in layer.stash_parts)
    _advance(qkv_AC, ba_A2H, weights, plan, layer, has_outputs=False)


def _advance(
    qkv_NC: Tensor, ba_N2H: Tensor, weights: DeltaWeights, plan: PiecedPlan, layer: LayerStates, *, has_outputs: bool
) -> Tensor | None:
    """Return the delta rule's outputs [N, H, v], and write the states of all requests that are not trees."""
    state, inputs, K = layer.state_SHdv, layer.inputs_S3C, weights.num_keys
    _, H, d, v = state.shape
    inputs_XC = torch.cat((inputs.index_select(0, plan.read_B).flatten(0, 1), qkv_NC))
    taps = zip(plan.window_CN, weights.conv_4C, strict=True)
    mixed_NC = F.silu(sum(inputs_XC.index_select(0, row_N) * weight_C for row_N, weight_C in taps))
    q_NX, k_NX, v_NX = mixed_NC.split([K * d, K * d, H * v], dim=-1)
    b_NH, a_NH = ba_N2H.float().chunk(2, dim=-1)
    rows = (
        _l2norm(k_NX.unflatten(1, (K, d))),
        v_NX.unflatten(1, (H, v)),
        b_NH.sigmoid(),
        weights.decay_H * F.softplus(a_NH + weights.dt_bias_H),
    )
    if has_outputs:
        q_NKd = _l2norm(q_NX.unflatten(1, (K, d))) * d**-0.5
    outputs = [rows[1][:0]]
    for own in plan.pieces:
        size = own.path_BRR.shape[:2]
        q = q_NKd.index_select(0, own.row_P).unflatten(0, size) if has_outputs else None
        key, value, beta, g = (x.index_select(0, own.row_P).unflatten(0, size) for x in rows)
        before, last_B = state.index_select(0, own.read_B), None if own.write_B is None else own.last_B
        out, behind = delta_rule(q, key, value, beta, g, own.path_BRR, before, last_B)
        if out is not None:
            outputs.append(out.flatten(0, 1))
        if own.write_B is not None and behind is not None:
            state.index_copy_(0, own.write_B, behind)
            if own.keep_K is not None and own.kept_K is not None:
                state.index_copy_(0, own.keep_K, behind.index_select(0, own.kept_K))
    inputs.index_copy_(0, plan.write_W, inputs_XC[plan.tail_W3])
    return torch.cat(outputs).index_select(0, plan.order_N) if has_outputs else None


def _l2norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_rule(
    q_BRKd: Tensor | None,
    k_BRKd: Tensor,
    v_BRHv: Tensor,
    beta_BRH: Tensor,
    g_BRH: Tensor,
    path_BRR: Tensor,
    state_BHdv: Tensor,
    last_B: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the outputs [B, R, H, v] and, with `last_B`, the states behind these rows [B, H, d, v].

    Args:
        q_BRKd, k_BRKd: normalized; q is scaled. Without q there are no outputs.
        g_BRH: log gates, at most 0.
        path_BRR: A.
        state_BHdv: the states before the first rows.
    """
    B, R, K, d = k_BRKd.shape
    H, v = v_BRHv.shape[2:]

    def per_key_head(x_BHXY: Tensor) -> Tensor:
        return x_BHXY.view(B, K, H // K, *x_BHXY.shape[2:])

    # In float64: next to large sums, float32 has no digits left for the small gate between two neighbours.
    total_BHR = g_BRH.transpose(1, 2).double() @ path_BRR.double().transpose(1, 2)
    decay_BHRR = (total_BHR[..., :, None] - total_BHR[..., None, :]).to(g_BRH.dtype)
    decay_BHRR = decay_BHRR.masked_fill_(~path_BRR[:, None], float("-inf")).exp_()  # before exp, which may overflow
    k_BK1Rd = k_BRKd.transpose(1, 2)[:, :, None]
    kq_BK1Xd = k_BK1Rd if q_BRKd is None else torch.cat((k_BK1Rd, q_BRKd.transpose(1, 2)[:, :, None]), dim=3)
    score_BK1XR = kq_BK1Xd @ k_BK1Rd.transpose(3, 4)
    seen_BHXv = (kq_BK1Xd @ per_key_head(state_BHdv)).view(B, H, -1, v)
    fade_BHR1, beta_BHR1 = total_BHR.to(g_BRH.dtype).exp()[..., None], beta_BRH.transpose(1, 2)[..., None]
    u_BHRv = beta_BHR1 * (v_BRHv.transpose(1, 2) - fade_BHR1 * seen_BHXv[:, :, :R])
    if R > 1:
        link_BHRR = beta_BHR1 * (score_BK1XR[..., :R, :] * per_key_head(decay_BHRR)).view(B, H, R, R)
        u_BHRv = torch.linalg.solve_triangular(link_BHRR, u_BHRv, upper=False, unitriangular=True)
    out_BRHv = None
    if q_BRKd is not None:
        weight_BHRR = (score_BK1XR[..., R:, :] * per_key_head(decay_BHRR)).view(B, H, R, R)
        out_BRHv = (fade_BHR1 * seen_BHXv[:, :, R:]).add_(weight_BHRR @ u_BHRv).transpose(1, 2)
    if last_B is None:
        return out_BRHv, None
    piece_B = torch.arange(B, device=last_B.device)
    decayed_BHRd = (k_BK1Rd * per_key_head(decay_BHRR[piece_B, :, last_B])[..., None]).view(B, H, R, d)
    behind_BHdv = decayed_BHRd.transpose(2, 3) @ u_BHRv
    return out_BRHv, behind_BHdv.addcmul_(fade_BHR1[piece_B, :, last_B, :, None], state_BHdv)
