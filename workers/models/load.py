"""Loads a rank's share of a target or draft model, into the class that its description selects."""

from __future__ import annotations

from pathlib import Path

from workers.models.base import BaseDecoder
from workers.models.checkpoint import text_name
from workers.models.decoder import Decoder
from workers.models.layers import ON_CPU, RankWeights, Runtime
from workers.models.specs import ModelSpec, TransformersSpec, check_parallel


def load_decoder(
    path: Path | str,
    spec: ModelSpec,
    runtime: Runtime = ON_CPU,
    tap_layers: tuple[int, ...] = (),
    max_model_len: int | None = None,
) -> BaseDecoder:
    """Read this rank's share of a checkpoint folder.

    Args:
        spec: the result of `read_spec` for the same folder.
        tap_layers: capture the residual stream before these layers (0 .. L), for EAGLE-3.
        max_model_len: see `TransformersDecoder`.

    Raises:
        ValueError: the ranks cannot split the model, a tap is outside it or cannot be taken, or a tensor is missing,
            unknown or of another shape.
    """
    check_parallel(spec, runtime.tp.size)
    for tap in tap_layers:
        if not 0 <= tap <= spec.num_layers:
            raise ValueError(f"feature layer {tap} is outside a model of {spec.num_layers} layers")
    if not isinstance(spec, TransformersSpec):
        return Decoder(RankWeights(path, runtime, text_name), spec, tap_layers)
    from workers.models.transformers_model import TransformersDecoder  # imports transformers, which takes seconds

    return TransformersDecoder(RankWeights(path, runtime, keeps_bits=False), spec, tap_layers, max_model_len)
