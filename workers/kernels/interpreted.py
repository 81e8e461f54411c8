"""Triton's interpreter, which runs kernels in Python on the CPU."""

from __future__ import annotations

import os


def is_interpreted() -> bool:
    """Return True if Triton interprets its kernels on the CPU, for tests. Triton reads the variable on import."""
    return os.environ.get("TRITON_INTERPRET") == "1"
