"""The stage that the start of a service has reached, for the progress lines of the process that waits for it.

The engine starts in other processes. They write their stage to Ray's key-value store, and the waiting process reads it.
"""

from __future__ import annotations

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

_STAGE = b"secateur_stage"


def report_stage(stage: str) -> None:
    """Publish the stage that the engine's start has reached, for `current_stage` in another process."""
    _internal_kv_put(_STAGE, stage.encode(), overwrite=True)


def current_stage() -> str | None:
    """Return the published stage, or None before the first."""
    stage = _internal_kv_get(_STAGE)
    return stage.decode() if stage else None


def clear_stage() -> None:
    """Remove the stage of an earlier start on the same Ray."""
    _internal_kv_del(_STAGE)
