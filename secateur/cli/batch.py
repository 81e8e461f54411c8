"""`secateur batch run`: answer a file of requests with a running service; `secateur.batch` does the work."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from secateur.cli.command import Command
from secateur.cli.options import ApiKey, AsJson, LogLevel
from secateur.cli.usage import Group
from secateur.errors import ConfigError

batch_app = typer.Typer(
    cls=Group, help="Answer files of requests (OpenAI's batch format).", no_args_is_help=True, rich_markup_mode=None
)


@batch_app.callback()
def batch_root() -> None:
    """Answer files of requests (OpenAI's batch format)."""


@batch_app.command("run", cls=Command)
def batch_run(
    input_path: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request per line.")],
    output_path: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.jsonl", help="One answer per line.")],
    base_url: Annotated[
        list[str] | None,
        typer.Option("--base-url", help="The running service [http://127.0.0.1:8000]; repeat it for several."),
    ] = None,
    api_key: ApiKey = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests in flight.")] = 16,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep the lines already answered, or start over.")
    ] = True,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Put the answers into the order of the input when the run ends.")
    ] = False,
    retries: Annotated[int, typer.Option("--retries", min=0, help="Tries again per request.")] = 5,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for an answer.")] = 600.0,
    outage_timeout: Annotated[
        float, typer.Option("--outage-timeout", min=0, help="Seconds that the service may be gone, once it was there.")
    ] = 300.0,
    log_level: LogLevel = None,
    as_json: AsJson = False,
) -> None:
    """Answer every line of a file. Stop it at any moment and run it again: answered lines are not sent twice.

    With several services, each line goes to the one with the fewest pending requests.

    Lines that changed after they were answered are answered again; OUT.jsonl.digests holds the requests' digests.

    Example: secateur batch run questions.jsonl -o answers.jsonl --concurrency 32
    """
    from secateur.batch import run_batch
    from secateur.client import DEFAULT_BASE_URL

    if Path("-") in (input_path, output_path):
        raise ConfigError("-: a batch reads its input twice and resumes from its output; name files")
    summary = run_batch(
        input_path,
        output_path,
        base_url=base_url or DEFAULT_BASE_URL,
        api_key=api_key,
        concurrency=concurrency,
        resume=resume,
        ordered=ordered,
        retries=retries,
        timeout=timeout,
        outage_timeout=outage_timeout,
    )
    typer.echo(str(summary), err=True)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    raise typer.Exit(summary.exit_code)
