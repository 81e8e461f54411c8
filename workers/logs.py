"""What a rank logs, whether it is a plain process or an actor: each line names its role."""

from __future__ import annotations

import logging


def log_as(role: str) -> None:
    """Lines of INFO and above go to stderr from now on. Leaves a process alone that logs by its own rules already."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s")
