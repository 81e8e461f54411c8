"""Muon: momentum whose update is orthogonalised by a Newton-Schulz iteration, matrices of one shape batched.

`torch.optim.Muon` iterates in bf16, which is slow on CPUs without it; this one iterates in the parameter's dtype.
Source: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X."""


def orthogonalise(grads_KRC: Tensor, num_iterations: int = 5) -> Tensor:
    """Push the singular values of each of K matrices [K, R, C] towards 1."""
    a, b, c = QUINTIC
    is_tall = grads_KRC.size(1) > grads_KRC.size(2)
    x = grads_KRC.transpose(1, 2) if is_tall else grads_KRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if is_tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum + `orthogonalise`, for hidden matrices only (embeddings and gains go to AdamW)."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without closures
        """Update all parameters, those of one shape together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._step_shape(params, group["lr"], group["momentum"], group["weight_decay"])

    def _step_shape(self, params: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        """Update `params`, all of one shape [R, C], in place."""
        grads = [param.grad for param in params if param.grad is not None]
        buffers = [self.state[param].setdefault("momentum", torch.zeros_like(param)) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = orthogonalise(torch.stack(torch._foreach_lerp(grads, buffers, momentum)))
        num_rows, num_columns = params[0].shape
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, list(updates.unbind()), alpha=-lr * max(1, num_rows / num_columns) ** 0.5)
