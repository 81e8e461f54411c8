"""A mixture of experts in place of a decoder layer's MLP, as Qwen3-Next and Qwen3.5 have it.

    p = softmax(x W_router) in float32; of its k largest, divided by their sum, each weighs one expert's MLP
    y = sum of these + sigmoid(x w) shared(x), an expert that every row uses

A rank has its part of every expert's intermediate width, as of an MLP's, so that one sum over the ranks ends the layer.
Legend: N rows, D hidden width, E experts, k experts of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.block_scaled import stacked
from workers.kernels.linear import Linear
from workers.models.layers import Mlp, RankWeights, check_shape
from workers.models.specs import ModelSpec


class Expert:
    """One rank's part of an expert, from `prefix`experts.{number}.*, or from the tensors of all experts."""

    def __init__(self, weights: RankWeights, prefix: str, number: int, spec: ModelSpec) -> None:
        assert spec.moe is not None
        rank, size, inner = weights.tp.rank, weights.tp.size, spec.moe.inner_size
        if weights.has(fused := f"{prefix}gate_up_proj"):
            check_shape(weights, fused, (spec.moe.num_experts, 2 * inner, spec.hidden_size), _FIELDS)
            gate_up_ID = weights.get_range(fused, 0, number, number + 1)[0]
            down_DI = weights.get_range(f"{prefix}down_proj", 0, number, number + 1)[0]
            begin, end = inner * rank // size, inner * (rank + 1) // size
            gate_up = torch.cat((gate_up_ID[begin:end], gate_up_ID[inner + begin : inner + end]))
            self.gate_up, self.down = Linear(gate_up), Linear(down_DI[:, begin:end].contiguous())
            return
        own = f"{prefix}{number}."
        for name in ("gate", "up"):
            check_shape(weights, f"{own}{name}_proj.weight", (inner, spec.hidden_size), _FIELDS)
        parts = [weights.matrix(f"{own}{name}_proj.weight", 0, rank, size) for name in ("gate", "up")]
        self.gate_up = Linear(stacked(parts), None, weights.kernels)
        self.down = Linear(weights.matrix(f"{own}down_proj.weight", 1, rank, size), None, weights.kernels)


_FIELDS = "hidden_size, num_experts and moe_intermediate_size"


class Moe:
    """The experts of one layer, their router, and the shared expert.

    It reads this rank's share of `prefix`{gate, experts, shared_expert, shared_expert_gate}. Raises ValueError for a
    tensor that is missing or has another shape.
    """

    def __init__(self, weights: RankWeights, prefix: str, spec: ModelSpec) -> None:
        moe = spec.moe
        assert moe is not None
        check_shape(weights, f"{prefix}gate.weight", (moe.num_experts, spec.hidden_size), _FIELDS)
        self.tp, self.kernels, self._num_chosen = weights.tp, weights.kernels, moe.num_chosen
        self._router = Linear(weights.get(f"{prefix}gate.weight"))
        self._experts = [Expert(weights, f"{prefix}experts.", number, spec) for number in range(moe.num_experts)]
        self._shared = Mlp(weights, f"{prefix}shared_expert.", replace(spec, intermediate_size=moe.shared_size))
        self._shared_gate_1D = weights.get(f"{prefix}shared_expert_gate.weight")

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Apply the experts to normalized x_ND; return [N, D] summed over the ranks, without the residual."""
        weight_Nk, expert_Nk = self._router(x_ND).softmax(-1, dtype=torch.float32).topk(self._num_chosen, dim=-1)
        weight_Nk = (weight_Nk / weight_Nk.sum(-1, keepdim=True)).to(x_ND.dtype)
        out_ND = self._shared.share(x_ND) * F.linear(x_ND, self._shared_gate_1D).sigmoid()
        order = expert_Nk.flatten().argsort(stable=True)
        row_X, weight_X = order // self._num_chosen, weight_Nk.flatten()[order]
        counts = expert_Nk.flatten().bincount(minlength=len(self._experts)).tolist()
        begin = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                own = slice(begin, begin + count)
                inner = self.kernels.silu_mul(expert.gate_up(x_ND.index_select(0, row_X[own])))
                out_ND.index_add_(0, row_X[own], expert.down(inner) * weight_X[own, None])
            begin += count
        return self.tp.all_reduce_(out_ND)
