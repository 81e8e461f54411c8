"""Temporary folders that are removed even if their process is killed.

Each holds a file that its process keeps locked. The kernel releases the lock when the process ends. Creating a folder
removes those that are no longer locked.
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
"""Also marks our folders: a folder without this file is never removed."""


class OwnedTempDir:
    """A new folder of this process. Creating it removes the folders of killed processes."""

    def __init__(self) -> None:
        remove_orphaned()
        # Lock it before it gets its final name, or a process that starts now could find it unlocked and remove it.
        made = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
        self._lock: int | None = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.removeprefix("new-")))

    def remove(self) -> None:
        """Remove the folder. May be called twice, also by two threads."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def remove_orphaned() -> None:
    """Remove this user's temporary folders whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # not marked as ours, another user's, or just removed
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("removed %s, whose process was killed", folder)
        except BlockingIOError:
            pass  # its process is running
        finally:
            os.close(lock)
