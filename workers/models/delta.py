"""A gated delta net: the layers of hybrids that keep a state of fixed size instead of keys and values.

    q, k, v = silu(conv(x W_qkv))       depthwise, over a row and the three before it on its path
    q, k    = l2norm(q) d^-1/2, l2norm(k)
    beta, g = sigmoid(x W_b), -e^A_log softplus(x W_a + dt_bias)
    o       = the gated delta rule (`workers.kernels.torch_delta`)
    out     = (norm(o) silu(x W_z)) W_o

From the convolution to the norm everything is in float32, whatever the model's dtype: a state that is rounded to 16
bits after each step loses a percent in a hundred steps.

The rows of a tree write no state, since their verdict is not known. They are stashed, and `fold` runs the accepted ones
once more as a chain, just before the next forward pass. So there is a single way in which a state moves on.

Legend: N packed rows, H value heads, K key heads, d key width, v value width, C channels of q, k and v together. A rank
has its part of the key heads with their value heads, and their states: nothing is exchanged before the last sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.kernels.block_scaled import stacked
from workers.kernels.linear import Linear
from workers.kernels.select import DeltaPlan
from workers.kernels.torch_delta import DeltaWeights
from workers.kv_cache import KVPool, StatePool
from workers.models.checkpoint import split
from workers.models.layers import RankWeights, check_shape, fused_linear, row_parallel_linear
from workers.models.specs import ModelSpec


class GatedDelta:
    """The gated delta net of one layer.

    It reads this rank's share of `prefix`{in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, A_log, dt_bias, norm,
    out_proj}; Qwen3-Next has {in_proj_qkvz, in_proj_ba} instead, with the rows of each key head together. Raises
    ValueError for a tensor that is missing or has another shape.
    """

    def __init__(self, weights: RankWeights, prefix: str, spec: ModelSpec) -> None:
        delta = spec.delta
        assert delta is not None
        self.tp, self.kernels, self.eps = weights.tp, weights.kernels, spec.rms_norm_eps
        rank, size, width = self.tp.rank, self.tp.size, spec.hidden_size
        keys, values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
        shapes: dict[str, tuple[int, ...]] = {
            "conv1d.weight": (delta.num_channels, 1, 4),
            "A_log": (delta.num_value_heads,),
            "dt_bias": (delta.num_value_heads,),
            "norm.weight": (delta.value_dim,),
            "out_proj.weight": (width, values),
        }
        if is_grouped := weights.has(f"{prefix}in_proj_qkvz.weight"):
            shapes |= {
                "in_proj_qkvz.weight": (delta.num_channels + values, width),
                "in_proj_ba.weight": (2 * delta.num_value_heads, width),
            }
        else:
            shapes |= {
                "in_proj_qkv.weight": (delta.num_channels, width),
                "in_proj_z.weight": (values, width),
                "in_proj_b.weight": (delta.num_value_heads, width),
                "in_proj_a.weight": (delta.num_value_heads, width),
            }
        fields = "hidden_size and linear_{key,value}_head_dim, linear_num_*_heads"
        for name, shape in shapes.items():
            check_shape(weights, prefix + name, shape, fields)

        num_keys, num_heads = delta.num_key_heads // size, delta.num_value_heads // size
        self._num_values = values // size
        sections = [(0, keys), (keys, 2 * keys), (2 * keys, 2 * keys + values)]
        part = (0, rank, size)
        if is_grouped:
            ratio = num_heads // num_keys
            of_head = [delta.key_dim, delta.key_dim, ratio * delta.value_dim, ratio * delta.value_dim]
            row_O, row_2H = (_ungrouped(own, num_keys, weights.device) for own in (of_head, [ratio, ratio]))
            self._qkvz = fused_linear(weights, {f"{prefix}in_proj_qkvz": part}, has_bias=False, row_O=row_O)
            self._ba = fused_linear(weights, {f"{prefix}in_proj_ba": part}, has_bias=False, row_O=row_2H)
        else:
            parts = [weights.matrix(f"{prefix}in_proj_qkv.weight", *part, section=own) for own in sections]
            parts.append(weights.matrix(f"{prefix}in_proj_z.weight", *part))
            self._qkvz = Linear(stacked(parts), None, self.kernels)
            self._ba = fused_linear(weights, {f"{prefix}in_proj_{name}": part for name in "ba"}, has_bias=False)
        self._out = row_parallel_linear(weights, f"{prefix}out_proj", has_bias=False)

        def floats(name: str, begin: int = 0, end: int | None = None) -> Tensor:
            own = split(end - begin, rank, size) if end is not None else (0, None)
            return weights.get_range(prefix + name, 0, begin + own[0], own[1] and begin + own[1], torch.float32)

        conv_4C = torch.cat([floats("conv1d.weight", *own)[:, 0] for own in sections]).t().contiguous()
        decay_H, dt_bias_H = (floats(name, 0, delta.num_value_heads) for name in ("A_log", "dt_bias"))
        self._net = DeltaWeights(conv_4C, -decay_H.exp(), dt_bias_H, num_keys)
        self._norm_v = floats("norm.weight")

    def __call__(self, x_ND: Tensor, rotation: object, plan: DeltaPlan, kv: KVPool, index: int) -> Tensor:
        """Mix normalized x_ND along each path; return [N, D] summed over the ranks, without the residual.

        index: the layer's in the state pool. The rows of trees are stashed there; other requests' states move on.
        """
        assert kv.states is not None
        qkv_NC, z_NX = self._qkvz(x_ND).split([self._net.conv_4C.shape[1], self._num_values], dim=-1)
        o_NHv = self.kernels.delta_net(qkv_NC, self._ba(x_ND), self._net, plan, kv.states.layer(index))
        return self.tp.all_reduce_(self._out(self.kernels.gated_norm(o_NHv, z_NX, self._norm_v, self.eps)))

    def fold(self, row_A: Tensor, plan: DeltaPlan, states: StatePool, index: int) -> None:
        """Move states on by these stashed rows, which `plan` describes as chains."""
        self.kernels.delta_fold(row_A, self._net, plan, states.layer(index))


def _ungrouped(widths: list[int], num_groups: int, device: torch.device) -> Tensor:
    """Return the rows of groups that have parts of these widths, ordered by part."""
    row_GX = torch.arange(num_groups * sum(widths), device=device).view(num_groups, -1)
    return torch.cat([own.flatten() for own in row_GX.split(widths, dim=1)])
