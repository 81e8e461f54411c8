"""What the config.json of a draft head says of its decoder layers, for every format of such heads.

layer_windows(config, path) -> (window or None, ...)      one for each layer
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"


def layer_windows(config: Any, path: Path) -> tuple[int | None, ...]:
    """The sliding window of each layer, None = full attention. config: transformers' LlamaConfig or Qwen3Config.

    `layer_types` alone decides, as in speculators (whose trainer writes it) and in vLLM. A `sliding_window` without it
    says nothing: Llama's layers have none of their own, and heads for Qwen targets carry the target's number.
    Qwen3Config derives missing `layer_types` from `use_sliding_window`.

    Raises:
        ValueError: other types of layers, or windows without a width.
    """
    kinds = getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers
    if not set(kinds) <= {_SLIDING, _FULL}:
        raise ValueError(f"{path}: layer_types {kinds} are not supported: write {_SLIDING!r} or {_FULL!r}")
    window = getattr(config, "sliding_window", None)
    if _SLIDING in kinds and not window:
        raise ValueError(
            f"{path}: layer_types asks for {_SLIDING!r}, which has no width: write sliding_window (and "
            f"use_sliding_window: true), or {_FULL!r}"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)
