"""The folder of `--batch-dir`, in which a service keeps files and batches."""

from __future__ import annotations

import os
from pathlib import Path

from secateur.errors import ConfigError, Problem

FIELD = "batch_dir"


def check_batch_dir(path: str | Path) -> None:
    """Raise ConfigError if the folder can be neither used nor made. Makes nothing."""
    found = Path(path)
    while not found.exists() and found != found.parent:
        found = found.parent
    if not found.is_dir():
        raise ConfigError(Problem(FIELD, f"{found} is a file; name a folder, which is made if it does not exist"))
    if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(Problem(FIELD, f"{found} is not writable; change its owner, or name another folder"))
