"""Which of the two decoders runs a checkpoint.

load_decoder(path, spec, tp, device, dtype, tap_layers=(), kernels=TORCH, max_model_len=None) -> AnyDecoder
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from workers.kernels.select import TORCH, Kernels
from workers.models.decoder import Decoder
from workers.models.layers import SINGLE, TensorParallel
from workers.models.specs import ModelSpec, TransformersSpec

if TYPE_CHECKING:
    from workers.models.transformers_model import TransformersDecoder

AnyDecoder: TypeAlias = "Decoder | TransformersDecoder"
"""Both have plan, forward, logits, full_logits, new_kv_pool, can_be_captured, spec, tp, heads, vocab_range, device,
dtype, kernels."""


def load_decoder(
    path: Path | str,
    spec: ModelSpec,
    tp: TensorParallel = SINGLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tap_layers: tuple[int, ...] = (),
    kernels: Kernels = TORCH,
    max_model_len: int | None = None,
) -> AnyDecoder:
    """This rank's share of a checkpoint folder: our own decoder for the families it knows, else transformers' class.

    Args:
        spec: what `read_spec` says of the same folder; its kind decides.
        max_model_len: see `TransformersDecoder.load`; it changes nothing about a decoder of our own.

    Raises:
        ValueError: see `Decoder.load` and `TransformersDecoder.load`.
    """
    if not isinstance(spec, TransformersSpec):
        return Decoder.load(path, spec, tp, device, dtype, tap_layers, kernels)
    from workers.models.transformers_model import TransformersDecoder  # only here: its imports take seconds

    return TransformersDecoder.load(path, spec, tp, device, dtype, tap_layers, kernels, max_model_len)
