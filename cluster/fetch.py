"""`python -m cluster.fetch ID ...` downloads models from the Hugging Face hub into the local cache (`HF_HOME`).

It fetches the files that an engine reads, and no others. With `--wait` it downloads nothing and ends when another
process has: pods that share a volume wait so for the one Job that has network access.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from workers.models.hub import fetch_weights, resolve_path

logger = logging.getLogger(__name__)

PERIOD_S = 5.0


def fetch(names: Sequence[str]) -> None:
    """Download what is not in the cache yet. Raises FileNotFoundError if a model is not available."""
    for name in names:
        fetch_weights(name, resolve_path(name))


def wait(names: Sequence[str], period_s: float = PERIOD_S) -> None:
    """Return when the cache holds all files of all models. The environment must have HF_HUB_OFFLINE=1."""
    reported = ""
    while True:
        try:
            fetch(names)
        except FileNotFoundError as error:
            if (problem := str(error).splitlines()[0]) != reported:
                logger.warning("waiting: %s", problem)
                reported = problem
            time.sleep(period_s)
        else:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m cluster.fetch", description="Downloads models into HF_HOME.")
    parser.add_argument("names", nargs="+", metavar="ID", help="Hugging Face id or local folder")
    parser.add_argument("--wait", action="store_true", help="download nothing; wait until the files are there")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if args.wait:
        from huggingface_hub.constants import HF_HUB_OFFLINE

        if not HF_HUB_OFFLINE:
            parser.error("--wait needs HF_HUB_OFFLINE=1 in the environment; otherwise it would download")
        wait(args.names)
        return
    try:
        fetch(args.names)
    except FileNotFoundError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
