"""Triton launches replaced by torch for `simulated_cuda`, because the interpreter takes seconds per step.

The kernels themselves are tested elsewhere; these functions, named like them, read and write the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.tree import triton_growth
from drafter.tree.cost_model import calibrate
from drafter.tree.device import PARAMETERS
from drafter.tree.thresholds import below_failed, passes_min, passes_path
from workers.kernels.block_scaled import BlockScaled
from workers.sampling.logits_processors import penalize
from workers.sampling.philox import gumbel


def _row(*columns: Tensor) -> Any:
    return SimpleNamespace(**dict(zip(PARAMETERS, columns, strict=True)))


class _Top(NamedTuple):
    """The candidate children of the rows."""

    token_FK: Tensor
    weight_FK: Tensor
    prob_FK: Tensor
    top_prob_F: Tensor
    column_FK: Tensor


class _Nodes(NamedTuple):
    """Nodes [B, ...], as `TreeTensors` has them."""

    token: Tensor
    parent: Tensor
    depth: Tensor
    weight: Tensor
    path_prob: Tensor
    column: Tensor


def _attend(
    q: Tensor, kv: Tensor, out: Tensor, part: Tensor, lse: Tensor, sink: Tensor,
    pieces: Tensor, table: Tensor, visible: Tensor, low: Tensor, ancestors: Tensor, nodes: Tensor,
    scale: float, softcap: float, num_pieces: int, table_width: int, *_: Any,
    KV_HEADS: int, GROUP: int, WIDTH: int, PAGE: int, HAS_PATHS: bool, HAS_SOFTCAP: bool, HAS_SINKS: bool, **__: Any,
) -> None:  # fmt: skip
    row = torch.arange(len(out))
    first, num_rows, request, base, begin, end, count = pieces.view(7, num_pieces)
    is_own = (row[:, None] >= first) & (row[:, None] < first + num_rows)  # [N, pieces]
    piece = is_own.int().argmax(1)
    assert (is_own.sum(1) == count[piece]).all(), "the first piece of a row tells how many it has"
    place = torch.arange(table_width * PAGE).expand(len(row), -1)  # slots, or positions of a path
    slot, node = place, place - base[piece, None]
    if HAS_PATHS:
        leaf = torch.where(ancestors < 0, -1 - ancestors, ancestors)[row]
        own_node = nodes.view(-1, 64)[leaf].long().gather(1, node.clamp(0, 63))
        slot = torch.where(node < 0, place, (base[piece, None] + own_node).clamp(max=place.shape[1] - 1))
        is_seen = place < visible[row, None]
    else:
        is_ancestor = (node >= 0) & (node < 64) & (ancestors[row, None] >> node.clamp(0, 63) & 1 == 1)
        is_seen = (place >= low[row, None]) & (place < visible[row, None]) | is_ancestor
    is_read = is_own.int() @ ((place[0] >= begin[:, None]) & (place[0] < end[:, None])).int() > 0
    pages = table.view(-1, table_width)[request[piece]].long().gather(1, slot // PAGE)
    exact = torch.float64 if HAS_PATHS else torch.float32  # so that the order of sums changes nothing
    # Unread slots are absent. Slots that are read and masked must still hold finite numbers.
    stored = kv.view(torch.uint8) if kv.element_size() == 1 else kv  # torch indexes no 8-bit floats on a CPU
    kv_slots = stored[torch.where(is_read, pages * PAGE + slot % PAGE, 0)]
    keys, values = kv_slots.view(kv.dtype).to(q.dtype).unbind(2)
    values = torch.where(is_read[:, :, None, None], values.to(exact), 0)
    grouped = q.to(exact).unflatten(1, (KV_HEADS, GROUP))
    score = torch.einsum("nkgd,nskd->nkgs", grouped, keys.to(exact)).flatten(1, 2) * scale
    score = softcap * (score / softcap).tanh() if HAS_SOFTCAP else score
    score = score.masked_fill(~(is_seen & is_read)[:, None], -torch.inf)
    if HAS_SINKS:
        score = torch.cat([score, sink.float()[:, None].expand(len(row), -1, -1)], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
    weights = score.softmax(-1).nan_to_num(0).unflatten(1, (KV_HEADS, GROUP))
    out.copy_(torch.einsum("nkgs,nskd->nkgd", weights, values).flatten(1, 2))


def _multiply(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, out: Tensor, num_rows: int, num_outputs: int,
    num_inputs: int, x_stride: int, tiles_each: int, in_turn: int,
    *_: Any, COLUMNS: int, TILES_PER_BLOCK: int, HAS_BIAS: bool, HAS_SCALE: bool, HAS_ZERO: bool, **__: Any,
) -> None:  # fmt: skip
    if not HAS_SCALE:  # in float64, so that the order of sums changes nothing
        product = F.linear(x.double(), weight.double(), bias.double() if HAS_BIAS else None)
        (out if out.dim() == 2 else out.zero_()[0]).copy_(product)
        return
    block = COLUMNS * TILES_PER_BLOCK
    whole = BlockScaled(weight, scale, zero if HAS_ZERO else None, block, x.dtype).dequantized()
    if out.dim() == 2:
        out.copy_(F.linear(x, whole, bias if HAS_BIAS else None))  # to the bit as with a dequantized weight
    else:
        out.zero_()[0].copy_(F.linear(x.float(), whole.float()))


def _dequantize(
    weight: Tensor, scale: Tensor, zero: Tensor, out: Tensor, *_: Any, COLUMNS: int, TILES_PER_BLOCK: int,
    HAS_ZERO: bool, **__: Any,
) -> None:  # fmt: skip
    whole = BlockScaled(weight, scale, zero if HAS_ZERO else None, COLUMNS * TILES_PER_BLOCK, out.dtype)
    out.copy_(whole.dequantized())


def _add_splits(partial: Tensor, bias: Tensor, out: Tensor, *_: Any, HAS_BIAS: bool, **__: Any) -> None:
    out.copy_(partial.sum(0) + bias if HAS_BIAS else partial.sum(0))


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


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for the launches around `_attend` and `_search`, which do the whole work."""


def _search(
    x: Tensor, top_k: Tensor, top_p: Tensor, largest: Tensor, total: Tensor, bound: Tensor, count: Tensor,
    lists: Tensor, threshold: Tensor, *_: Any, **__: Any,
) -> None:  # fmt: skip
    from workers.sampling import sampler

    threshold.copy_(sampler.truncation_threshold(x, top_k, top_p))


def _prepare(
    x: Tensor, ba: Tensor, inputs: Tensor, stash: Tensor, source: Tensor, path: Tensor, rows: Tensor,
    conv: Tensor, decay: Tensor, bias: Tensor, mixed: Tensor, beta: Tensor, total: Tensor,
    num_rows: int, num_stashed: int, x_stride: int, ba_stride: int, scale: float,
    *, HEADS: int, KEY_HEADS: int, KEY_WIDTH: int, VALUE_WIDTH: int, IS_FOLD: bool, **_: Any,
) -> None:  # fmt: skip
    *window, origin, _count, _keep, place = rows[: 8 * num_rows].view(8, num_rows)[:, : len(mixed)].long()
    own = source[: len(mixed)].long() if IS_FOLD else torch.arange(len(mixed))
    all_rows = torch.cat([inputs.flatten(0, 1), x[own]])
    index = torch.stack(window)
    mixed_rows = all_rows[torch.where(index < 0, -1 - index, 3 * len(inputs) + index)].float()
    q, k, v = F.silu((mixed_rows * conv[:, None]).sum(0)).split(
        [KEY_HEADS * KEY_WIDTH] * 2 + [HEADS * VALUE_WIDTH], dim=1
    )
    q, k = (F.normalize(part.unflatten(1, (KEY_HEADS, -1)), dim=-1, eps=1e-3).flatten(1) for part in (q, k))
    mixed.copy_(torch.cat([scale * q, k, v], dim=1))
    b, a = ba[own].float().chunk(2, dim=1)
    beta.copy_(b.sigmoid())
    node = torch.arange(len(mixed)) - origin[:, None]
    is_seen = (node >= 0) & (node < 64) & (path[: len(mixed), None] >> node.clamp(0, 63) & 1 == 1)
    total.copy_(is_seen.double() @ (decay * F.softplus(a + bias)).double())
    if not IS_FOLD:
        is_kept = (place >= 0) & (place < num_stashed)
        stash[place[is_kept]] = torch.cat([x, ba], dim=1)[: len(mixed)][is_kept]


def _advance(
    x: Tensor, inputs: Tensor, state: Tensor, source: Tensor, path: Tensor, rows: Tensor,
    mixed: Tensor, beta: Tensor, total: Tensor, out: Tensor, num_rows: int, num_requests: int, *_: Any,
    HEADS: int, KEY_HEADS: int, KEY_WIDTH: int, VALUE_WIDTH: int, IS_FOLD: bool, **__: Any,
) -> None:  # fmt: skip
    """Run the recurrence row by row, each from the state behind its parent."""
    sections, before = rows[: 8 * num_rows].view(8, num_rows).long(), inputs.clone()
    shape = (KEY_HEADS, KEY_WIDTH, HEADS // KEY_HEADS)
    begins, read, write = rows[8 * num_rows :].view(3, -1).tolist()
    behind: dict[int, Tensor] = {}

    def leave(seat: int, row: int) -> None:
        state[seat] = behind[row]
        own = [source[place] if IS_FOLD and place >= 0 else place for place in sections[1:4, row].tolist()]
        inputs[seat] = torch.stack([x[place] if place >= 0 else before.flatten(0, 1)[-1 - place] for place in own])

    for request in range(num_requests):
        for row in range(begins[request], begins[request + 1]):
            origin, keep = int(sections[4, row]), int(sections[6, row])
            above = [bit for bit in range(row - origin) if int(path[row]) >> bit & 1]
            log_gate, start = total[row], state[read[request]]
            if above:
                log_gate, start = total[row] - total[origin + above[-1]], behind[origin + above[-1]]
            elif write[request] and row > begins[request]:
                start = behind[row - 1]
            key, query = (
                mixed[row, part * KEY_HEADS * KEY_WIDTH :][: KEY_HEADS * KEY_WIDTH].view(KEY_HEADS, 1, KEY_WIDTH, 1)
                .expand(shape[0], shape[2], shape[1], 1).flatten(0, 1) for part in (1, 0)
            )  # fmt: skip
            value = mixed[row, 2 * KEY_HEADS * KEY_WIDTH :].view(HEADS, 1, VALUE_WIDTH)
            faded = start * log_gate.exp().float()[:, None, None]
            u = beta[row][:, None, None] * (value - (key * faded).sum(1, keepdim=True))
            behind[row] = faded + key * u
            if not IS_FOLD:
                out[row] = (query * behind[row]).sum(1)
            if write[request] and keep:
                leave(keep, row)
        if write[request] and begins[request] < begins[request + 1]:
            leave(write[request], begins[request + 1] - 1)


def _copy(words: Tensor, source: Tensor, target: Tensor, *_: Any, **__: Any) -> None:
    words[:, target] = words[:, source]


def _penalize(
    logits: Tensor, count: Tensor, ancestors: Tensor, columns: Tensor, table: Tensor, out: Tensor, maxima: Tensor,
    top_k: Tensor, top_p: Tensor,
    num_columns: int, count_stride: int, table_width: int, num_scored: int, num_nodes: int, num_splits: int,
    *, HAS_PENALTIES: bool, IS_FIRST: bool, **_: Any,
) -> None:  # fmt: skip
    assert num_splits == 1, "rows of one block"
    own, x = _row(*table.repeat_interleave(num_scored, dim=0).unbind(1)), logits.float()
    if HAS_PENALTIES:
        on_path = torch.zeros_like(x)
        if not IS_FIRST:
            bits = (ancestors.flatten()[:, None] >> torch.arange(1, 1 + num_nodes) & 1).float()
            on_path.scatter_add_(1, columns[:, 1:].repeat_interleave(num_scored, dim=0), bits)
        penalties = (each.float()[:, None] for each in (own.repetition, own.frequency, own.presence))
        x = penalize(x, count.repeat_interleave(num_scored, dim=0), on_path, *penalties)
    is_hot = own.temperature > 0
    out.copy_(x / torch.where(is_hot, own.temperature, 1.0).float()[:, None])
    maxima[:, 0].copy_(out.amax(1))
    top_k.copy_(torch.where(is_hot, own.top_k, 0))
    top_p.copy_(torch.where(is_hot, own.top_p, 1.0))


def _mask_min_p(
    x: Tensor, maxima: Tensor, table: Tensor, num_columns: int, table_width: int, num_scored: int, *_: Any, **__: Any
) -> None:
    own = _row(*table.repeat_interleave(num_scored, dim=0).unbind(1))
    floor = maxima[:, 0] + torch.where(own.temperature > 0, own.min_p, 0.0).float().log()
    x.masked_fill_(x < floor[:, None], -torch.inf)


def _best_of_block(
    logits: Tensor, table: Tensor, floor: Tensor, ids: Tensor, depth: Tensor,
    values: Tensor, columns: Tensor, sums: Tensor,
    num_columns: int, table_width: int, num_scored: int, num_splits: int, k: int, num_rows: int,
    *, IS_PROCESSED: bool, IS_FIRST: bool, HAS_IDS: bool, **_: Any,
) -> None:  # fmt: skip
    """Score rows that hold no node of the last level like all others: nothing reads what is stored for them."""
    assert num_splits == 1, "rows of one block"
    own = _row(*table.repeat_interleave(num_scored, dim=0).unbind(1))
    x = logits.float()
    if IS_PROCESSED:
        x = x.masked_fill(x < floor[:, None], -torch.inf)
    else:
        x = x / torch.where(own.temperature > 0, own.temperature, 1.0).float()[:, None]
    tau = torch.where(own.tau > 0, own.tau, 1.0).float()[:, None]
    s = x
    if (own.has_noise > 0).any():
        token = ids if HAS_IDS else torch.arange(num_columns)
        level = _level(table, is_first=IS_FIRST)
        seed, index = own.seed[::num_scored].view(torch.int64), own.index[::num_scored].long() + level
        noise = gumbel(seed, index, 0, 1 + int(token.max()))[:, token].repeat_interleave(num_scored, dim=0)
        s = x + torch.where(own.has_noise[:, None] > 0, noise, 0.0)
    best = s.sort(dim=1, descending=True, stable=True)
    values[0, :, 0].copy_(best.values[:, :k])
    values[1, :, 0].copy_(x.gather(1, best.indices[:, :k]))
    columns[:, 0].copy_(best.indices[:, :k])
    for total, value in zip(sums, (x.amax(1), x.logsumexp(1), (s / tau).logsumexp(1)), strict=True):
        total[:, 0].copy_(value)


def _level(table: Tensor, *, is_first: bool) -> int:
    return 0 if is_first else int(table[0, PARAMETERS.index("level")])


def _children(nodes: _Nodes, depth: int, top: _Top, parameters: Any, log_odds: Tensor) -> _Nodes:
    """Return the candidates [B, F K] below the rows of this depth, in the order of their parents, best first.

    top: the children of the root (depth 0), or of all other rows.
    """
    first, num_scored = min(depth, 1), top.top_prob_F.shape[1]
    parents = _Nodes(*(field[:, first : first + num_scored] for field in nodes))
    passes_BF = passes_path(parents.path_prob, parameters.path_prob[:, None])
    passes_BF &= passes_min(top.top_prob_F, parameters.min_prob[:, None])
    is_open_BF = (parents.depth == depth) & (depth < parameters.max_depth[:, None])
    is_open_BF &= passes_BF | (parameters.is_auto[:, None] == 0)
    path_prob_BFK = parents.path_prob[:, :, None] * top.prob_FK
    weight_BFK = parents.weight[:, :, None] * calibrate(top.weight_FK, log_odds)
    is_child_BFK = is_open_BF[:, :, None] & (weight_BFK > 0)  # NaN is no child
    row_F1 = torch.arange(first, first + num_scored, device=weight_BFK.device)[:, None]
    return _Nodes(
        token=top.token_FK.flatten(1),
        parent=row_F1.expand_as(weight_BFK).flatten(1),
        depth=torch.full_like(weight_BFK, depth + 1, dtype=torch.int64).flatten(1),
        weight=torch.where(is_child_BFK, weight_BFK, 0.0).flatten(1),
        path_prob=torch.where(passes_BF[:, :, None], path_prob_BFK, below_failed(path_prob_BFK)).flatten(1),
        column=top.column_FK.flatten(1),
    )


def _best(nodes: _Nodes, children: _Nodes, num_nodes_B: Tensor) -> tuple[_Nodes, Tensor]:
    """Keep each request's root and its num_nodes best candidates in their order; ties go to the earlier one.

    Also returns [B, R] the row in `nodes` of each kept one's parent.
    """
    candidates = _Nodes(*(torch.cat(pair, dim=1) for pair in zip(nodes, children, strict=True)))
    (_, R), (_, C) = nodes.weight.shape, candidates.weight.shape
    ranked = candidates.weight.sort(dim=1, descending=True, stable=True)
    rank_R = torch.arange(R, device=candidates.weight.device)
    is_kept_BR = (ranked.values[:, :R] > 0) & (rank_R <= num_nodes_B[:, None])
    kept_BR = torch.where(is_kept_BR, ranked.indices[:, :R], C).sort(dim=1).values  # C = empty
    at_BR = kept_BR.clamp(max=C - 1)
    chosen = _Nodes(*(field.gather(1, at_BR) for field in candidates))
    new_row_BC = torch.zeros_like(candidates.parent).scatter(1, at_BR, rank_R.expand_as(at_BR))
    parent_BR, weight_BR = new_row_BC.gather(1, chosen.parent), chosen.weight * (kept_BR < C)
    return chosen._replace(parent=parent_BR, weight=weight_BR), chosen.parent


def _ancestors(parent_BR: Tensor, depth: int) -> Tensor:
    """Return int64 bitmasks [B, R] of each row's path, itself included, in trees of that depth.

    Each iteration doubles the distance covered.
    """
    row_R = torch.arange(parent_BR.shape[1], device=parent_BR.device)
    mask_BR = (torch.ones_like(row_R) << row_R).expand_as(parent_BR)
    for _ in range(depth.bit_length()):
        mask_BR = mask_BR | mask_BR.gather(1, parent_BR)
        parent_BR = parent_BR.gather(1, parent_BR)
    return mask_BR


def _score_children(
    values: Tensor, columns: Tensor, sums: Tensor, table: Tensor, fit: Tensor, ids: Tensor,
    old_depth: Tensor, old_weight: Tensor, old_path_prob: Tensor, children: Tensor, weight: Tensor, path_prob: Tensor,
    table_width: int, num_scored: int, num_splits: int, k: int, num_rows: int, num_children: int,
    *, IS_FIRST: bool, HAS_IDS: bool, **_: Any,
) -> None:  # fmt: skip
    """Score children from the sums of the one block."""
    depth = _level(table, is_first=IS_FIRST)
    parameters, column = _row(*table.unbind(1)), columns[:, 0]
    tau = torch.where(parameters.tau > 0, parameters.tau, 1.0).float().repeat_interleave(num_scored)[:, None]
    top = _Top(
        token_FK=ids[column] if HAS_IDS else column,
        weight_FK=torch.exp(values[0, :, 0] / tau - sums[2]),
        prob_FK=torch.exp(values[1, :, 0] - sums[1]),
        top_prob_F=torch.exp(sums[0] - sums[1])[:, 0],
        column_FK=column,
    )
    top = _Top(*(each.unflatten(0, (len(table), num_scored)) for each in top))
    if IS_FIRST:
        one = torch.ones(len(table), 1)
        nodes = _Nodes(*[0 * one.long()] * 3, one, one.double(), 0 * one.long())
    else:
        nodes = _Nodes(*[old_depth] * 3, old_weight, old_path_prob, old_depth)
    found = _children(nodes, depth, top, parameters, fit[depth])
    for place, value in zip((*children, weight, path_prob), (found.token, found.column, *found[3:5]), strict=True):
        place.copy_(value)


def _keep_best(
    children: Tensor, child_weight: Tensor, child_path_prob: Tensor, table: Tensor,
    state: Tensor, weight: Tensor, path_prob: Tensor, rows: Tensor, new_row: Tensor,
    table_width: int, num_requests: int, num_nodes: int, num_children: int, k: int,
    *, IS_FIRST: bool, HAS_LEAF_SIBLINGS: bool, **_: Any,
) -> None:  # fmt: skip
    parameters, num_rows, depth = _row(*table.unbind(1)), 1 + num_nodes, _level(table, is_first=IS_FIRST)
    if IS_FIRST:
        is_root = (torch.arange(num_rows) == 0).expand(num_requests, -1)
        none = torch.zeros_like(is_root, dtype=torch.int64)
        token = parameters.token.long()[:, None] * is_root
        nodes = _Nodes(token, none, none, is_root.float(), is_root.double(), none)
    else:
        token, parent, old_depth, column, _ = state
        nodes = _Nodes(token, parent, old_depth, weight, path_prob, column)
    parent = (torch.arange(num_children) // k + (depth > 0)).expand(num_requests, -1)
    token, column = children
    child_depth = torch.full_like(parent, depth + 1)
    if HAS_LEAF_SIBLINGS:
        child_depth = torch.where(torch.arange(num_children) % k > 0, -child_depth, child_depth)
    below = _Nodes(token, parent, child_depth, child_weight, child_path_prob, column)
    kept, old_parent = _best(nodes, below, parameters.num_nodes)
    ancestors = _ancestors(kept.parent, depth + 1)
    for place, value in zip(state, (*kept[:3], kept.column, ancestors), strict=True):
        place.copy_(value)
    weight.copy_(kept.weight)
    path_prob.copy_(kept.path_prob)
    position = parameters.position.long()[:, None] + kept.depth
    for place, value in zip(rows, (kept.token, position, ancestors, old_parent), strict=True):
        place.copy_(value[:, 1:])
    parameters.level.fill_(depth + 1)


def _gather_features(roots: Tensor, hidden: Tensor, old_parent: Tensor, out: Tensor, *_: Any, **__: Any) -> None:
    both = roots[:, None] if hidden is roots else torch.cat([roots[:, None], hidden], dim=1)
    out.copy_(both.gather(1, old_parent[:, :, None].expand(-1, -1, out.shape[2])))


def _place_static(
    children: Tensor, child_weight: Tensor, child_path_prob: Tensor, table: Tensor, shape: Tensor,
    state: Tensor, weight: Tensor, path_prob: Tensor, rows: Tensor, table_width: int, num_requests: int,
    num_nodes: int, num_children: int, shape_stride: int, *, IS_FIRST: bool, **_: Any,
) -> None:  # fmt: skip
    depth = _level(table, is_first=IS_FIRST)
    parameters = _row(*table.unbind(1))
    parent, row_depth, ancestors, source = shape
    if IS_FIRST:
        for place in (state[0], state[3], weight, path_prob):
            place.zero_()
        state[0, :, 0], weight[:, 0], path_prob[:, 0] = parameters.token, 1, 1
        state[1], state[2], rows[0], rows[3] = parent, row_depth, 0, 0
        rows[1], rows[2] = parameters.position[:, None] + row_depth[1:], ancestors[1:]
    token, column = children
    (new,) = (row_depth == depth + 1).nonzero(as_tuple=True)
    at = source[new]
    state[0][:, new], state[3][:, new] = token[:, at], column[:, at]
    weight[:, new] = child_weight[:, at] * (new <= parameters.num_nodes[:, None])
    path_prob[:, new] = child_path_prob[:, at]
    rows[0][:, new - 1], rows[3][:, new - 1] = token[:, at], parent[new]
    parameters.level.fill_(depth + 1)


TWINS = {
    twin.__name__: twin
    for twin in (
        _attend,
        _multiply,
        _dequantize,
        _add_splits,
        _draw,
        _choose,
        _fill,
        _top_of_block,
        _top_of_row,
        _search,
        _prepare,
        _advance,
        _copy,
        _penalize,
        _mask_min_p,
        _best_of_block,
        _score_children,
        _keep_best,
        _place_static,
        _gather_features,
    )
} | dict.fromkeys(("_combine", "_groups", "_bound", "_list"), _nothing)

_GROWTH = (_penalize, _mask_min_p, _best_of_block, _score_children, _keep_best, _place_static, _gather_features)


class _Launch:
    def __init__(self, twin: Callable[..., None]) -> None:
        self._twin = twin

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._twin


@contextmanager
def growth_twins() -> Iterator[None]:
    """Grow trees on a CPU with these twins, where the interpreter takes a hundred times as long."""
    with pytest.MonkeyPatch.context() as patch:
        for twin in _GROWTH:
            patch.setattr(triton_growth, twin.__name__, _Launch(twin))
        yield
