"""Folders in the temporary directory that cannot outlive their process for long.

Each holds a file that its process keeps locked. The kernel drops the lock when the process ends, however it ends, and
whoever makes the next folder removes those whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "secateur-"
_LOCK = ".secateur-owner"
"""Also the mark of a folder of ours: one without it is never touched, whatever its name."""


class OwnedTempDir:
    """A new folder of this process, and the end of those whose process was killed."""

    def __init__(self) -> None:
        remove_orphaned()
        # Locked before it has its name: otherwise somebody who starts now would find it without an owner.
        made = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
        self._lock: int | None = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.removeprefix("new-")))

    def remove(self) -> None:
        """May be called twice, by two threads too."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def remove_orphaned() -> None:
    """Removes this user's folders in the temporary directory whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # not ours, another user's, or just removed
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("removed %s, whose process was killed", folder)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)
