"""Logging of ranks, as plain processes and as actors: each line names the role."""

from __future__ import annotations

import logging


def log_as(role: str) -> None:
    """Log INFO and above to stderr. Has no effect if the process has already configured logging."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s")
