"""The first operation of a head that reads several layers of its target.

The verifier runs it, so that a drafter receives H values per token instead of all taps.
Legend: N packed rows, X width of all taps together, T taps, D target hidden width, H draft hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from workers.kernels.linear import Linear
from workers.kernels.pointwise import rms_norm
from workers.models import block_format, eagle3_format
from workers.models.checkpoint import Weights
from workers.models.specs import BlockSpec, DraftSpec, Eagle3Spec

BLOCK_TENSORS = ("fc.weight", "hidden_norm.weight")
"""Tensors of a block head that the verifier reads and the drafter ignores; `is_of_eagle3_fusion` tells EAGLE-3's."""

Norm = Callable[[Tensor], Tensor]


class Fusion:
    """after(fc(before(taps)))."""

    def __init__(self, fc_HX: Tensor, before: Norm | None = None, after: Norm | None = None) -> None:
        self._fc, self.before, self.after = Linear(fc_HX), before, after

    @torch.inference_mode()
    def __call__(self, taps_NX: Tensor) -> Tensor:
        """Convert the target's taps [N, X] to features [N, H], in the weights' dtype."""
        x_NH = self._fc(taps_NX if self.before is None else self.before(taps_NX))
        return x_NH if self.after is None else self.after(x_NH)


def is_of_eagle3_fusion(name: str) -> bool:
    """Return whether the verifier reads this tensor of an EAGLE-3 head, and the drafter ignores it."""
    return re.fullmatch(r"(fc|input_norm|fc_norm\.\d+)\.weight", name) is not None


@torch.inference_mode()
def load_fusion(
    path: Path | str, spec: DraftSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Fusion | None:
    """Read a head's fusion; None if its features are the target's last hidden states as they are.

    Raises ValueError if a tensor is missing, unknown or of another shape.
    """
    if not isinstance(spec, Eagle3Spec | BlockSpec):
        return None
    eps = spec.layers.rms_norm_eps
    rename = eagle3_format.canonical_name if isinstance(spec, Eagle3Spec) else block_format.canonical_name
    weights = Weights(path, dtype, device, rename)
    fc_HX = weights.get("fc.weight")
    expected = spec.matrix_shapes()["fc.weight"]
    if fc_HX.shape != expected:
        raise ValueError(f"{path}: fc.weight is {tuple(fc_HX.shape)}, this target needs {expected}")
    if isinstance(spec, BlockSpec):
        norm_H = weights.get("hidden_norm.weight")
        return Fusion(fc_HX, after=lambda x_NH: rms_norm(x_NH, norm_H, eps))
    before = _norm_of_taps(weights, spec, eps)
    weights.finish(allowed=lambda name: not is_of_eagle3_fusion(name))
    return Fusion(fc_HX, before)


def _norm_of_taps(weights: Weights, spec: Eagle3Spec, eps: float) -> Norm | None:
    """Return EAGLE-3.1's norm: over all taps, or over each."""
    if spec.input_norm:
        weight_X = weights.get("input_norm.weight")
        return lambda taps_NX: rms_norm(taps_NX, weight_X, eps)
    if spec.fc_norm:
        weight_TD = torch.stack([weights.get(f"fc_norm.{i}.weight") for i in range(len(spec.tap_layers))])
        return lambda taps_NX: rms_norm(taps_NX.view(-1, *weight_TD.shape), weight_TD, eps).flatten(1)
    return None
