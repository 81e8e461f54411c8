"""The names of ranks: in each line that they log, and in `top` and `ps`."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path


def log_as(role: str) -> None:
    """Log to stderr, INFO and above unless the environment says otherwise; if logging is configured, do nothing."""
    level = os.environ.get("SECATEUR_LOG_LEVEL", "info").upper()
    logging.basicConfig(level=level, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s")


def name_process(role: str) -> None:
    """Give this process a name, of which Linux keeps 15 bytes. Does nothing elsewhere."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(role)
