"""Triton launches replaced by torch for `simulated_cuda`, because the interpreter takes seconds per step.

The kernels themselves are tested elsewhere; these functions, named like them, read and write the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.sampling.philox import gumbel


def _attend(
    q: Tensor, kv: Tensor, out: Tensor, partial: Tensor, lse: Tensor, sink: Tensor,
    tiles: Tensor, tile_low: Tensor, table: Tensor, visible: Tensor, low: Tensor, ancestors: Tensor,
    scale: float, softcap: float, num_rows: int, num_tiles: int, table_width: int, num_splits: int, *_: Any,
    KV_HEADS: int, GROUP: int, WIDTH: int, PAGE: int, IS_SPLIT: bool, HAS_SOFTCAP: bool, HAS_SINKS: bool, **__: Any,
) -> None:  # fmt: skip
    row = torch.arange(num_rows)
    first, count, request, base, last = tiles.view(5, num_tiles)
    tile = ((row[:, None] >= first) & (row[:, None] < first + count)).int().argmax(1)
    slot = torch.arange(table_width * PAGE)
    node = slot - base[tile, None]
    is_ancestor = (node >= 0) & (node < 64) & (ancestors[row, None] >> node.clamp(0, 63) & 1 == 1)
    is_seen = (slot >= low[row, None]) & (slot < visible[row, None]) | is_ancestor
    is_read = (slot >= tile_low[tile, None]) & (slot < last[tile, None])
    pages = table.view(-1, table_width)[request[tile]].repeat_interleave(PAGE, dim=1)
    # Unread slots are absent. Slots that are read and masked must still hold finite numbers.
    keys, values = kv[torch.where(is_read, pages * PAGE + slot % PAGE, 0)].unbind(2)
    values = torch.where(is_read[:, :, None, None], values.float(), 0).repeat_interleave(GROUP, dim=2)
    score = torch.einsum("nhd,nshd->nhs", q.float(), keys.float().repeat_interleave(GROUP, dim=2)) * scale
    score = softcap * (score / softcap).tanh() if HAS_SOFTCAP else score
    score = score.masked_fill(~(is_seen & is_read)[:, None], -torch.inf)
    if HAS_SINKS:
        score = torch.cat([score, sink.float()[:, None].expand(num_rows, -1, -1)], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
    attended = torch.einsum("nhs,nshd->nhd", score.softmax(-1).nan_to_num(0), values)
    if not IS_SPLIT:
        out.copy_(attended)
        return
    partial.zero_()[0].copy_(attended)
    lse.fill_(-torch.inf)[0].copy_(score.logsumexp(-1) / torch.log(torch.tensor(2.0)))


def _combine(partial: Tensor, lse: Tensor, out: Tensor, *_: Any, **__: Any) -> None:
    out.copy_((partial * (lse * torch.log(torch.tensor(2.0))).softmax(0).nan_to_num(0)[..., None]).sum(0))


def _draw(
    logits: Tensor, temperature: Tensor, seed: Tensor, index: Tensor, floor: Tensor, scores: Tensor, ids: Tensor,
    num_columns: int, row_stride: int, start: int, *_: Any, **__: Any,
) -> None:  # fmt: skip
    is_hot = (temperature > 0)[:, None]
    x = logits / torch.where(is_hot, temperature[:, None], 1.0)
    x = x.masked_fill(x < floor[:, None], -torch.inf) + is_hot * gumbel(seed, index, start, start + num_columns)
    best = x.max(1)
    scores.fill_(-torch.inf)[:, 0].copy_(best.values)
    ids.fill_(start)[:, 0].copy_(best.indices + start)


def _choose(scores: Tensor, ids: Tensor, score: Tensor, token: Tensor, *_: Any, **__: Any) -> None:
    best = scores.max(1)
    score.copy_(best.values)
    token.copy_(ids.gather(1, best.indices[:, None])[:, 0])


def _fill(seed: Tensor, index: Tensor, out: Tensor, num_columns: int, start: int, *_: Any, **__: Any) -> None:
    out.copy_(gumbel(seed, index, start, start + num_columns))


def _top_of_block(x: Tensor, tau: Tensor, values: Tensor, indices: Tensor, lse: Tensor, *_: Any, **__: Any) -> None:
    best = x.sort(dim=1, descending=True, stable=True)
    k = values.shape[2]
    assert values.shape[1] == 1, "rows of one block"
    values[:, 0].copy_(best.values[:, :k])
    indices[:, 0].copy_(best.indices[:, :k])
    lse[:, 0].copy_((x / tau[:, None]).logsumexp(1))


def _top_of_row(
    values: Tensor, indices: Tensor, lses: Tensor, value: Tensor, index: Tensor, lse: Tensor, *_: Any, **__: Any
) -> None:
    for found, told in ((values, value), (indices, index), (lses, lse)):
        told.copy_(found[:, 0])


def _threshold(x: Tensor, top_k: Tensor, top_p: Tensor, lists: Tensor, threshold: Tensor, *_: Any, **__: Any) -> None:
    from workers.sampling import sampler

    threshold.copy_(sampler.truncation_threshold(x, top_k, top_p))


def _copy(words: Tensor, source: Tensor, target: Tensor, *_: Any, **__: Any) -> None:
    words[:, target] = words[:, source]


TWINS = {
    twin.__name__: twin
    for twin in (_attend, _combine, _draw, _choose, _fill, _top_of_block, _top_of_row, _threshold, _copy)
}
