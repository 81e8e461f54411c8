"""`secateur env` describes this machine, and `secateur download` fetches models before they are served."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import json
import os
from typing import Annotated, Any

import typer

from secateur.cli.checks import checked
from secateur.cli.options import AsJson, LogLevel, ModelArgument
from secateur.flags import with_engine_flags
from secateur.install import service_part


def env(as_json: AsJson = False) -> None:
    """Print versions, processor, memory, GPUs and settings, for a bug report. Keys and tokens are not shown.

    Example: secateur env
    """
    from secateur.environment import as_text, report

    sections = report()
    typer.echo(json.dumps(sections, indent=1) if as_json else as_text(sections))


@with_engine_flags(server=False)
def download(
    engine: dict[str, Any],
    model: ModelArgument = None,
    token: Annotated[
        str | None, typer.Option("--token", help="Of the Hugging Face hub [HF_TOKEN, which `ps` does not show].")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Fetch what `serve` with the same model and drafter would fetch, into the same cache (HF_HOME); start nothing.

    A model that this version cannot run is refused before its weights are fetched.

    Example: secateur download meta-llama/Llama-3.1-8B-Instruct -sc '{"method": "eagle3", "model":
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}'
    """
    if token is not None:
        os.environ["HF_TOKEN"] = token
    args = checked(engine, model=model)
    for line in service_part("download")(args):
        typer.echo(line)
