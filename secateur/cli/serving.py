"""`secateur serve` starts a service, on Ray or without; `secateur plan` predicts placement and speed."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import os
import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secateur.cli.checks import checked
from secateur.cli.options import AsJson, LogLevel, ModelArgument
from secateur.errors import ConfigError, Problem
from secateur.flags import with_engine_flags
from secateur.install import service_part

if TYPE_CHECKING:
    from secateur.config import EngineArgs

HARDWARE_NAMES = ("a100", "l4", "l40s", "h100", "h200", "b200")
"""The keys of `secateur.plan.HARDWARE`."""


@with_engine_flags(server=True)
def serve(engine: dict[str, Any], model: ModelArgument = None, log_level: LogLevel = None) -> None:
    """Serve a model over HTTP, on Ray, until Ctrl-C (SIGINT) or SIGTERM; the third such signal kills it.

    Start-up progress goes to stderr; one line on stdout gives the address.

    Example: secateur serve meta-llama/Llama-3.1-8B-Instruct -tp 2 -sc '{"method": "eagle3", "model":
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 24}'
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs of a shell script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = checked(engine, model=model)
    if args.api_server_count is not None:
        _serve_here(args)
        return
    if not os.environ.get("RAY_ADDRESS"):  # otherwise the service listens on another machine
        service_part("check_port")(args.host, args.port)
        if find_spec("ray"):
            service_part("check_local_models")(args)
    if find_spec("ray"):  # without Ray, print the error alone
        typer.echo("secateur: importing PyTorch and Ray", err=True)
    service_part("serve")(args)


def _serve_here(args: "EngineArgs") -> None:
    """Serve without Ray."""
    if os.environ.get("RAY_ADDRESS"):
        instead = "leave it out and set num_replicas in a Serve application, or unset RAY_ADDRESS"
        raise ConfigError(
            Problem("api_server_count", f"is for a service of this machine alone; on a cluster {instead}")
        )
    if find_spec("torch"):  # without it, print the error alone
        typer.echo("secateur: importing PyTorch", err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with service_part("local_service")(args, shows_progress=True) as url:
            typer.echo(f"Secateur serves {args.model_id} at {url}/v1 (Ctrl-C stops it)")
            signal.pause()
    except KeyboardInterrupt:
        typer.echo("secateur: stopped", err=True)


@with_engine_flags(server=True)
def plan(
    engine: dict[str, Any],
    model: ModelArgument = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="NAME|FILE",
            help=f"Predict from published figures: {', '.join(HARDWARE_NAMES)}, or JSON.",
        ),
    ] = None,
    acceptance: Annotated[
        list[float] | None,
        typer.Option("--acceptance", metavar="P ...", help="Chances of a node's first, second, ... child [typical]."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", metavar="B ...", help="Requests that decode together [1 2 4 .. 64].")
    ] = None,
    context: Annotated[int | None, typer.Option("--context", help="Tokens each has in the cache [512].")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Draft nodes of every tree; 0 is none [the best for each batch].")
    ] = None,
    log_level: LogLevel = None,
    as_json: AsJson = False,
) -> None:
    """Show where drafter and verifier would run and whether they fit; predict speed and tree sizes.

    Uses no GPU and starts nothing. Reads models as the engine does, which needs the packages of the extra `serve`.

    Example: secateur plan -tp 2 --speculative-config '{"method": "draft_model", "model": "bundled:draft"}'

    Example: secateur plan --hardware h100 --batch 1 8 64 --context 2000
    """
    from secateur.plan import PlanRequest, read_hardware

    options = {
        "hardware": read_hardware(hardware) if hardware else None,
        "acceptance": tuple(acceptance) if acceptance else None,
        "batches": tuple(batch) if batch else None,
        "context": context,
        "nodes": nodes,
    }
    request = PlanRequest.load({key: value for key, value in options.items() if value is not None})
    args = checked(engine, model=model)
    typer.echo(f"secateur: reading the configuration of {args.model_id}", err=True)
    typer.echo(service_part("plan")(args, request, as_json=as_json))
