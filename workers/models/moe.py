"""A mixture of experts in place of a decoder layer's MLP, as Qwen3-Next, Qwen3.5 and DeepSeek-V3 have it.

    p = softmax(x W_router) in float32; of its k largest, divided by their sum, each weighs one expert's MLP
    y = sum of these + sigmoid(x w) shared(x), an expert that every row uses

DeepSeek-V3's router, all of it in float32, and its shared expert, which has no gate:

    p = sigmoid(x W_router); s = p + b decides, which no weight has a part of
    of the groups of experts, those whose two largest s have the largest sum; of their experts, the k with the largest s
    y = sum of these k, each weighed by scaling p / (sum of their p), + shared(x)

A rank has its part of every expert's intermediate width, as of an MLP's, so that one sum over the ranks ends the layer.
Legend: N rows, D hidden width, E experts, k experts of a row, G groups of experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.block_scaled import stacked
from workers.kernels.linear import Linear
from workers.models.layers import Mlp, RankWeights, check_shape
from workers.models.specs import ModelSpec, RouterSpec


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


_FIELDS = "hidden_size, moe_intermediate_size, and its number of experts"


class SoftmaxRouter:
    """Chooses a row's k most probable experts."""

    def __init__(self, weights: RankWeights, prefix: str, num_chosen: int) -> None:
        self._product, self._num_chosen = Linear(weights.get(f"{prefix}weight")), num_chosen

    def __call__(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, which sum up to 1, and experts [N, k]."""
        weight_Nk, expert_Nk = self._product(x_ND).softmax(-1, dtype=torch.float32).topk(self._num_chosen, dim=-1)
        return weight_Nk / weight_Nk.sum(-1, keepdim=True), expert_Nk


class GroupRouter:
    """DeepSeek-V3's router, which also reads `prefix`e_score_correction_bias."""

    def __init__(self, weights: RankWeights, prefix: str, num_chosen: int, spec: RouterSpec) -> None:
        self._weight_ED, self._bias_E = (
            weights.get_range(f"{prefix}{name}", 0, 0, None, torch.float32)
            for name in ("weight", "e_score_correction_bias")
        )
        self._num_chosen, self._spec = num_chosen, spec

    def __call__(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, which sum up to the scaling factor, and experts [N, k]."""
        score_NE = F.linear(x_ND.float(), self._weight_ED).sigmoid()
        choice_NGX = (score_NE + self._bias_E).unflatten(1, (self._spec.num_groups, -1))
        group_NG = choice_NGX.topk(2, dim=-1).values.sum(-1).topk(self._spec.num_chosen_groups, dim=-1).indices
        is_open_NG = torch.zeros_like(choice_NGX[..., 0], dtype=torch.bool).scatter_(1, group_NG, True)
        choice_NE = choice_NGX.masked_fill(~is_open_NG[..., None], float("-inf")).flatten(1)
        expert_Nk = choice_NE.topk(self._num_chosen, dim=-1).indices
        weight_Nk = score_NE.gather(1, expert_Nk)
        return weight_Nk / (weight_Nk.sum(-1, keepdim=True) + 1e-20) * self._spec.scaling, expert_Nk


class Moe:
    """The experts of one layer, their router, and the shared expert.

    It reads this rank's share of `prefix`{gate, experts, shared_expert, shared_expert_gate}, or of {gate, experts,
    shared_experts} with DeepSeek-V3's router. Raises ValueError for a tensor that is missing or has another shape.
    """

    def __init__(self, weights: RankWeights, prefix: str, spec: ModelSpec) -> None:
        moe = spec.moe
        assert moe is not None
        check_shape(weights, f"{prefix}gate.weight", (moe.num_experts, spec.hidden_size), _FIELDS)
        self.tp, self.kernels, self._num_chosen = weights.tp, weights.kernels, moe.num_chosen
        self._experts = [Expert(weights, f"{prefix}experts.", number, spec) for number in range(moe.num_experts)]
        shared = replace(spec, intermediate_size=moe.shared_size)
        self._router: SoftmaxRouter | GroupRouter
        self._shared_gate_1D = None
        if moe.router is None:
            self._router = SoftmaxRouter(weights, f"{prefix}gate.", moe.num_chosen)
            self._shared = Mlp(weights, f"{prefix}shared_expert.", shared)
            self._shared_gate_1D = weights.get(f"{prefix}shared_expert_gate.weight")
        else:
            self._router = GroupRouter(weights, f"{prefix}gate.", moe.num_chosen, moe.router)
            self._shared = Mlp(weights, f"{prefix}shared_experts.", shared)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Apply the experts to normalized x_ND; return [N, D] summed over the ranks, without the residual."""
        weight_Nk, expert_Nk = self._router(x_ND)
        out_ND = self._shared.share(x_ND)
        if self._shared_gate_1D is not None:
            out_ND = out_ND * F.linear(x_ND, self._shared_gate_1D).sigmoid()
        order = expert_Nk.flatten().argsort(stable=True)
        row_X, weight_X = order // self._num_chosen, weight_Nk.to(x_ND.dtype).flatten()[order]
        counts = expert_Nk.flatten().bincount(minlength=len(self._experts)).tolist()
        begin = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                own = slice(begin, begin + count)
                inner = self.kernels.silu_mul(expert.gate_up(x_ND.index_select(0, row_X[own])))
                out_ND.index_add_(0, row_X[own], expert.down(inner) * weight_X[own, None])
            begin += count
        return self.tp.all_reduce_(out_ND)
