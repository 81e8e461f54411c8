"""Selects the decoder implementation of a checkpoint.

load_decoder(path, spec, tp, device, dtype, tap_layers=(), kernels=TORCH, max_model_len=None) -> BaseDecoder
"""

from __future__ import annotations

from pathlib import Path

import torch

from workers.kernels.select import TORCH, Kernels
from workers.models.base import BaseDecoder
from workers.models.decoder import Decoder
from workers.models.layers import SINGLE, TensorParallel
from workers.models.specs import ModelSpec, TransformersSpec


def load_decoder(
    path: Path | str,
    spec: ModelSpec,
    tp: TensorParallel = SINGLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tap_layers: tuple[int, ...] = (),
    kernels: Kernels = TORCH,
    max_model_len: int | None = None,
) -> BaseDecoder:
    """Read this rank's share of a checkpoint folder, into `Decoder` or `TransformersDecoder`.

    Args:
        spec: the result of `read_spec` for the same folder; its type selects the implementation.
        max_model_len: see `TransformersDecoder.load`; ignored by `Decoder`.

    Raises:
        ValueError: see `Decoder.load` and `TransformersDecoder.load`.
    """
    if not isinstance(spec, TransformersSpec):
        return Decoder.load(path, spec, tp, device, dtype, tap_layers, kernels)
    from workers.models.transformers_model import TransformersDecoder  # imports transformers, which takes seconds

    return TransformersDecoder.load(path, spec, tp, device, dtype, tap_layers, kernels, max_model_len)
