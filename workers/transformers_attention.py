"""The attention function that transformers' classes call: tree attention over this step's paged cache.

    register() -> str                     its name for a configuration's attention implementation
    Step(plan, kv, kernels, windows)      what one forward pass hands to it, as the model's keyword `secateur_step`
    capped_attention(q_NHd, kv_slots, plan, scale, window, softcap, sink_H) -> [N, Hq * d]

Legend: as in `workers.kernels.torch_attention`, whose plans `capped_attention` reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.kernels.choose import AttentionPlan, Kernels
from workers.kernels.torch_attention import MaskedPlan
from workers.kv import KVPool

_NAME = "secateur_tree"


class Step(NamedTuple):
    """One step's cache and plan, for every layer."""

    plan: AttentionPlan
    kv: KVPool
    kernels: Kernels
    windows: tuple[int | None, ...]  # per layer


def register() -> str:
    """Make the function known to transformers. No mask function goes with it: classes then build no mask."""
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
    secateur_step: Step,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, H, N, d] rotated queries, [1, Hkv, N, d] keys and values -> [1, N, H, d]. Writes the rows' KV.

    The arguments that fall into `_` were looked at when the model was let in (`workers.transformers_spec`).
    """
    layer: int = module.layer_idx
    plan, kv, kernels, windows = secateur_step
    num_heads, num_rows, d = query.shape[1:]
    kv.write(layer, torch.stack((key[0], value[0])).permute(2, 0, 1, 3), plan.write_slots_N)
    q_NHd = query[0].transpose(0, 1)
    scale = d**-0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        out = kernels.tree_attention(q_NHd, kv.layer(layer), plan, scale, windows[layer])
    else:
        assert isinstance(plan, MaskedPlan)
        out = capped_attention(q_NHd, kv.layer(layer), plan, scale, windows[layer], softcap, s_aux)
    return out.view(1, num_rows, num_heads, d), None


def capped_attention(
    q_NHd: Tensor,
    kv_slots: Tensor,
    plan: MaskedPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
    sink_H: Tensor | None,
) -> Tensor:
    """`tree_attention` with what no fused kernel does.

    Args:
        softcap: scores become softcap * tanh(score / softcap) before they are masked (Gemma-2).
        sink_H: [Hq] one more score per head in the softmax's denominator, which attends to nothing.
    """
    num_heads, d = q_NHd.shape[1:]
    H = kv_slots.shape[2]
    G = num_heads // H
    outputs = []
    for group in plan.groups:
        B, R, S = group.shape
        q_BHXd, (k_BHSd, v_BHSd) = group.queries(q_NHd, H), group.keys_values(kv_slots)
        score_BHXS = q_BHXd @ k_BHSd.transpose(2, 3) * scale
        if softcap is not None:
            score_BHXS = softcap * (score_BHXS / softcap).tanh()
        score_BHXS = score_BHXS + group.masks[window]
        if sink_H is not None:
            sink_BHX1 = sink_H.to(score_BHXS.dtype).view(H, 1, G).expand(B, H, R, G).reshape(B, H, R * G, 1)
            score_BHXS = torch.cat((score_BHXS, sink_BHX1), dim=-1)
        p_BHXS = score_BHXS.softmax(-1, dtype=torch.float32)[..., :S].to(q_NHd.dtype)
        out_BHXd = p_BHXS @ v_BHSd
        outputs.append(out_BHXd.view(B, H, R, G, d).transpose(1, 2).reshape(B * R, num_heads * d))
    if plan.order_N is None:
        return outputs[0] if outputs else q_NHd.reshape(0, num_heads * d)
    return torch.cat(outputs).index_select(0, plan.order_N)
