"""How much a command and its processes log: `--log-level`, which travels to them in the environment."""

from __future__ import annotations

import logging
import os
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
VARIABLE = "SECATEUR_LOG_LEVEL"
"""Read by ranks (`workers.logs`) and replicas as well. On a Ray cluster, set it in the environment of its nodes."""


def set_log_level(level: Level | None) -> None:
    """Log from this level on, here and in processes started from now on. None changes nothing."""
    if level is None:
        return
    os.environ[VARIABLE] = level
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("cluster", "secateur"):
        logging.getLogger(name).setLevel(level.upper())
