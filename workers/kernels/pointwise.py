"""The pointwise chains between a decoder layer's matrix products, in plain torch.

`workers.kernels.compiled` compiles them for CUDA, so they must not read values on the host or keep state.
Legend: N packed rows, V vocabulary, D hidden width, I intermediate width, H heads (queries then keys), d head width.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_rms_norm", "gated_norm", "head_input", "rms_norm", "rotate_", "rotation", "silu_mul"]


class Rotation(NamedTuple):
    """The cos and sin of one step's positions; the first half of sin has the minus sign of `rotate_half`."""

    cos_N1d: Tensor
    sin_N1d: Tensor


def rotation(positions_N: Tensor, signed_freq_d: Tensor, scaling: float, dtype: torch.dtype) -> Rotation:
    """Compute the Rotation of integer positions [N] in float32 and cast it, as transformers does."""
    angle_N1d = positions_N[:, None, None] * signed_freq_d
    cos_N1d, sin_N1d = angle_N1d.cos(), angle_N1d.sin()
    if scaling != 1:
        cos_N1d, sin_N1d = cos_N1d * scaling, sin_N1d * scaling
    return Rotation(cos_N1d.to(dtype), sin_N1d.to(dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last dimension in float32, cast back, then multiply by weight (transformers' order).

    A float32 weight beside another dtype is one that this would round: it is multiplied first.
    """
    if x.dtype is torch.float32 and weight.dim() == 1:
        return _rms_norm_on_host(x, weight, eps) if x.is_cpu else F.rms_norm(x, weight.shape, weight, eps)
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    return (normed * weight).to(x.dtype) if weight.dtype is torch.float32 else normed.to(x.dtype) * weight


def _rms_norm_on_host(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in five operations instead of torch's nine, which saves 5 % of a small model's forward pass on CPU."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rms = torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).sqrt_()
    return (x / rms).mul_(weight)


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the residual stream after a sublayer, x + delta, and its norm."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def head_input(
    tokens_N: Tensor, embedding_VD: Tensor, token_norm_D: Tensor, feature_ND: Tensor, feature_norm_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the normed embeddings beside the normed features [N, 2 D], and the normed features alone."""
    normed_ND = rms_norm(feature_ND, feature_norm_D, eps)
    return torch.cat((rms_norm(F.embedding(tokens_N, embedding_VD), token_norm_D, eps), normed_ND), dim=-1), normed_ND


def gated_norm(x_NHv: Tensor, z_NX: Tensor, weight_v: Tensor, eps: float) -> Tensor:
    """Return the norm of each head of x times silu(z), in float32, cast to z's dtype: [N, H * v]."""
    return (rms_norm(x_NHv, weight_v, eps).flatten(1) * F.silu(z_NX.float())).to(z_NX.dtype)


def silu_mul(gate_up_N2I: Tensor) -> Tensor:
    """Return silu(gate) * up, [N, I], of the two halves."""
    gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
    return F.silu(gate_NI).mul_(up_NI)


def rotate_(qk_NHd: Tensor, rotation: Rotation, norm_Hd: Tensor | None = None, eps: float = 0.0) -> None:
    """Rotate queries and keys in place, x cos + rotate_half(x) sin, after `rms_norm` of each head with `norm_Hd`.

    A rotation narrower than a head leaves the other widths as they are.
    """
    if norm_Hd is not None:
        qk_NHd.copy_(rms_norm(qk_NHd, norm_Hd, eps))
    qk_NHd = qk_NHd[..., : rotation.cos_N1d.shape[-1]]
    # Rolling by half a head swaps its halves. To the compiler it is an index, where a concatenation is a copy.
    swapped_NHd = qk_NHd.roll(qk_NHd.shape[-1] // 2, dims=-1)
    qk_NHd.mul_(rotation.cos_N1d).addcmul_(swapped_NHd, rotation.sin_N1d)
