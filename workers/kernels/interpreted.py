"""Triton's interpreter, which runs kernels in Python on the CPU."""

from __future__ import annotations

import os


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU: for tests. Triton reads this as it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
