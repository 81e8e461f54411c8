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
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.block_scaled import stacked
from workers.kernels.linear import Linear
from workers.kernels.torch_delta import DeltaPlan, delta_rule
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

        self.num_keys, self.num_heads = delta.num_key_heads // size, delta.num_value_heads // size
        self.key_dim, self.value_dim = delta.key_dim, delta.value_dim
        self._widths = [keys // size, keys // size, values // size]
        sections = [(0, keys), (keys, 2 * keys), (2 * keys, 2 * keys + values)]
        part = (0, rank, size)
        if is_grouped:
            ratio = self.num_heads // self.num_keys
            of_head = [delta.key_dim, delta.key_dim, ratio * delta.value_dim, ratio * delta.value_dim]
            row_O, row_2H = (_ungrouped(own, self.num_keys, weights.device) for own in (of_head, [ratio, ratio]))
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

        self._conv_4C = torch.cat([floats("conv1d.weight", *own)[:, 0] for own in sections]).t().contiguous()
        self._decay_H = -floats("A_log", 0, delta.num_value_heads).exp()
        self._dt_bias_H = floats("dt_bias", 0, delta.num_value_heads)
        self._norm_v = floats("norm.weight")

    def __call__(self, x_ND: Tensor, rotation: object, plan: DeltaPlan, kv: KVPool, index: int) -> Tensor:
        """Mix normalized x_ND along each path; return [N, D] summed over the ranks, without the residual.

        index: the layer's in the state pool. The rows of trees are stashed there; other requests' states move on.
        """
        states = kv.states
        assert states is not None
        qkvz, ba_N2H = self._qkvz(x_ND), self._ba(x_ND)
        qkv_NC, z_NX = qkvz.split([sum(self._widths), self._widths[-1]], dim=-1)
        states.stash(index, plan.num_tree_rows, qkv_NC, ba_N2H)
        o_NHv = self._advance(qkv_NC, ba_N2H, plan, states, index)
        assert o_NHv is not None
        normed_NHv = self.kernels.rms_norm(o_NHv, self._norm_v, self.eps)
        gated_NX = normed_NHv.flatten(1) * F.silu(z_NX.float())
        return self.tp.all_reduce_(self._out(gated_NX.to(x_ND.dtype)))

    def fold(self, row_A: Tensor, plan: DeltaPlan, states: StatePool, index: int) -> None:
        """Move states on by these stashed rows, which `plan` describes as chains."""
        self._advance(*states.stashed(index, row_A), plan, states, index, has_outputs=False)

    def _advance(
        self,
        qkv_NC: Tensor,
        ba_N2H: Tensor,
        plan: DeltaPlan,
        states: StatePool,
        index: int,
        *,
        has_outputs: bool = True,
    ) -> Tensor | None:
        """Return the delta rule's outputs [N, H, v], and write the states of all requests that are not trees."""
        state, inputs = states.layer(index)
        inputs_XC = torch.cat((inputs.index_select(0, plan.read_B).flatten(0, 1), qkv_NC))
        taps = zip(plan.window_CN, self._conv_4C, strict=True)
        mixed_NC = F.silu(sum(inputs_XC.index_select(0, row_N) * weight_C for row_N, weight_C in taps))
        q_NX, k_NX, v_NX = mixed_NC.split(self._widths, dim=-1)
        b_NH, a_NH = ba_N2H.float().chunk(2, dim=-1)
        rows = (
            _l2norm(k_NX.unflatten(1, (self.num_keys, self.key_dim))),
            v_NX.unflatten(1, (self.num_heads, self.value_dim)),
            b_NH.sigmoid(),
            self._decay_H * F.softplus(a_NH + self._dt_bias_H),
        )
        if has_outputs:
            q_NKd = _l2norm(q_NX.unflatten(1, (self.num_keys, self.key_dim))) * self.key_dim**-0.5
        outputs = [rows[1][:0]]
        for own in plan.pieces:
            size = own.path_BRR.shape[:2]
            q = q_NKd.index_select(0, own.row_P).unflatten(0, size) if has_outputs else None
            k, v, beta, g = (x.index_select(0, own.row_P).unflatten(0, size) for x in rows)
            before, last_B = state.index_select(0, own.read_B), None if own.write_B is None else own.last_B
            out, behind = delta_rule(q, k, v, beta, g, own.path_BRR, before, last_B)
            if out is not None:
                outputs.append(out.flatten(0, 1))
            if own.write_B is not None and behind is not None:
                state.index_copy_(0, own.write_B, behind)
                if own.keep_K is not None and own.kept_K is not None:
                    state.index_copy_(0, own.keep_K, behind.index_select(0, own.kept_K))
        inputs.index_copy_(0, plan.write_W, inputs_XC[plan.tail_W3])
        return torch.cat(outputs).index_select(0, plan.order_N) if has_outputs else None


def _ungrouped(widths: list[int], num_groups: int, device: torch.device) -> Tensor:
    """Return the rows of groups that have parts of these widths, ordered by part."""
    row_GX = torch.arange(num_groups * sum(widths), device=device).view(num_groups, -1)
    return torch.cat([own.flatten() for own in row_GX.split(widths, dim=1)])


def _l2norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
