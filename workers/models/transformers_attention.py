"""The attention function that transformers' classes call: tree attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.kernels.select import AttentionPlan, Kernels
from workers.kv_cache import KVPool

_NAME = "secateur_tree"


class AttentionStep(NamedTuple):
    """The attention arguments of one forward pass, for all layers."""

    plan: AttentionPlan
    kv: KVPool
    kernels: Kernels
    windows: tuple[int | None, ...]  # per layer


_step: ContextVar[AttentionStep] = ContextVar("_step")


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Set the arguments of one forward pass. Some classes do not hand arguments of it on to their attention."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def register() -> str:
    """Register the function with transformers. Without a mask function, classes build no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    return _NAME


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend: rotated queries [1, H, N, d], keys and values [1, Hkv, N, d] -> [1, N, H, d]. Writes the rows' KV.

    `workers.models.transformers_spec` has checked that the arguments in `_` have no effect.
    """
    layer: int = module.layer_idx
    plan, kv, kernels, windows = _step.get()
    num_heads, num_rows, d = query.shape[1:]
    kv.write(layer, torch.stack((key[0], value[0])).permute(2, 0, 1, 3), plan.write_slots_N)
    q_NHd = query[0].transpose(0, 1)
    scale = d**-0.5 if scaling is None else scaling
    out = kernels.tree_attention(q_NHd, kv.layer(layer), plan, scale, windows[layer], softcap, s_aux)
    return out.view(1, num_rows, num_heads, d), None
