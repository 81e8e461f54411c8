"""Fixtures of the tests of kernels."""

from __future__ import annotations

from typing import Any

import pytest

from workers.kernels.interpreted import is_interpreted


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted products add in the order of their columns, as tensor cores do; NumPy's depends on the shapes."""
    if not is_interpreted():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
        total = d.data
        for column in range(a.data.shape[-1]):
            total = total + a.data[..., column, None] * b.data[..., None, column, :]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
