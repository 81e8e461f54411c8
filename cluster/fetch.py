"""`python -m cluster.fetch ID ...` downloads models from the Hugging Face hub into the local cache (`HF_HOME`).

It fetches the files that an engine reads, and no others; `secateur download` does so for a model and its drafter.
With `--wait` it downloads nothing and ends when another process has: pods that share a volume wait so for the one Job
that has network access.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.system.progress import Progress
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError
from workers.models.hub import fetch_weights, resolve_path

logger = logging.getLogger(__name__)

PERIOD_S = 5.0


def fetch(names: Sequence[str]) -> None:
    """Download what is not in the cache yet. Raises FileNotFoundError if a model is not available."""
    for name in names:
        fetch_weights(name, resolve_path(name))


def download(args: EngineArgs) -> list[str]:
    """Fetch the files of a model, its tokenizer and its drafter as a service of `args` would; return a line for each.

    Raises ConfigError if one is not available, or cannot be run.
    """
    # These take seconds, which `python -m cluster.fetch` may do without.
    from cluster import convert
    from cluster.pairs import settled

    try:
        args = settled(args)
        config, _ = convert.read_engine(args)
        config, _ = convert.with_tokenizer(args, config)
        convert.fetch_weights(args, config, Progress())
    except ConfigError as error:
        if " the hub" not in str(error):
            raise
        hint = "check the name and the network; a gated model needs HF_TOKEN or --token"
        raise ConfigError(f"{' '.join(str(error).split())} ({hint})") from error
    folders = {args.model: config.model_path}
    if args.speculative_config is not None and args.speculative_config.model is not None and config.draft is not None:
        folders[args.speculative_config.model] = config.draft.model_path
    if args.tokenizer is not None:
        folders[args.tokenizer] = config.tokenizer_path
    return [_line(name, Path(folder)) for name, folder in folders.items()]


def _line(name: str, folder: Path) -> str:
    """Say where a model is, and whether it was there before."""
    source = Path(resolve_model(name)).expanduser()
    if source.exists():
        kind = "converted to" if folder != source else "nothing to download, it is"
        return f"{name}: on this machine; {kind} {folder}"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{name}: {folder} ({size / 1e9:.2f} GB)"


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
