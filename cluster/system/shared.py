"""Numbers that the fronts of one service share: arrays in files that all of them map, and a lock.

They need no process of their own, and an access takes microseconds. The kernel frees the lock of a process that dies.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Shared:
    """Arrays in a folder, one file each. None = of this process alone, without files and locks.

    number: of this front, 0 .. num_fronts - 1.
    """

    def __init__(self, folder: Path | None = None, number: int = 0, num_fronts: int = 1) -> None:
        self.folder, self.number, self.num_fronts = folder, number, num_fronts
        self._lock = None if folder is None else (folder / "lock").open("a")

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> NDArray[Any]:
        """Return the array of this name, which is zero at first."""
        if self.folder is None:
            return np.zeros(shape, dtype)
        with (self.folder / name).open("a+b") as file:
            file.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.memmap(self.folder / name, dtype, "r+", shape=shape)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of `locked` meanwhile. Nothing inside may wait."""
        if self._lock is None:
            yield
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
