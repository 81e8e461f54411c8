"""`secateur drafter`: swaps the draft head of a running service, or scores another one beside it."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.command import Command
from secateur.cli.options import AsJson
from secateur.cli.usage import Group

drafter_app = typer.Typer(
    cls=Group,
    help="Swap the draft head of a running service, or score one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Service = Annotated[str, typer.Option("--base-url", "--url", help="The running service.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        "--admin-api-key", help="Default: the environment's SECATEUR_ADMIN_API_KEY, which `ps` does not show."
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 3600.0
"""A head may be fetched from the hub first."""


@drafter_app.command("swap", cls=Command)
def swap(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of the service's machine, or a hub id.")],
    base_url: Service = DEFAULT_URL,
    admin_api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Let a running service draft with another head of the same method and shape. No token changes.

    Example: secateur drafter swap ./my-head --base-url http://127.0.0.1:8000
    """
    _swap(_path(folder), base_url, admin_api_key, as_json=as_json)


@drafter_app.command("rollback", cls=Command)
def rollback(base_url: Service = DEFAULT_URL, admin_api_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Go back to the head that drafted before the present one.

    Example: secateur drafter rollback --base-url http://127.0.0.1:8000
    """
    _swap(None, base_url, admin_api_key, as_json=as_json)


@drafter_app.command("canary", cls=Command)
def canary(
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="As of `swap`; without it, tell how the scored head does.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Score it in so many steps of the engine.", min=1)] = 2000,
    stop: Annotated[bool, typer.Option("--stop", help="End it, and tell what was found.")] = False,
    base_url: Service = DEFAULT_URL,
    admin_api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Score another head on live traffic beside the serving one, without drafting with it.

    It returns at once; the same command without FOLDER tells what was found so far. A drafter that restarts forgets it.
    Example: secateur drafter canary ./my-head --steps 2000
    """
    from secateur.errors import ConfigError

    if folder is not None and stop:
        raise ConfigError("--stop ends the head that is scored; leave FOLDER out")
    body: dict[str, Any] | None = None if folder is None else {"model": _path(folder), "canary_steps": steps}
    answer = _ask({"model": None, "canary_steps": 0} if stop else body, base_url, admin_api_key)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    left = f"{answer['steps_left']} steps to go, {answer['windows_left']} windows to score"
    typer.echo(f"replica {answer['replica']}: {answer['model']} drafts nothing; {left}")
    typer.echo(f"scored on {answer['num_tokens']} tokens: {answer['verdict']}")
    if "gain" not in answer:
        return
    typer.echo("expected share of chains accepted up to each depth:")
    for name in ("serving", "candidate"):
        head = answer[name]
        pairs = zip(head["acceptance"], head["standard_error"], strict=True)
        typer.echo(f"  {name:<9}  " + "  ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in pairs))
    typer.echo(f"  gain of a chain: {answer['gain']:+.3f} ± {answer['gain_standard_error']:.3f} tokens")


def _path(folder: str) -> str:
    path = Path(folder).expanduser()
    return str(path.resolve()) if path.is_dir() else folder


def _ask(body: dict[str, Any] | None, base_url: str, key: str | None) -> dict[str, Any]:
    """Send a body to the service, or ask it without one; return the answer. Raises SecateurError."""
    import httpx2

    from secateur.client import check_base_url
    from secateur.errors import APIConnectionError, SecateurError

    check_base_url(base_url)
    headers = {"Authorization": f"Bearer {key or os.environ.get('SECATEUR_ADMIN_API_KEY', '')}"}
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/admin/drafter"
    method = "GET" if body is None else "POST"
    try:
        response = httpx2.request(method, url, json=body, headers=headers, timeout=_TIMEOUT_S)
    except httpx2.HTTPError as error:
        raise APIConnectionError(f"no answer from {base_url}: {error}") from None
    if response.is_error:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{url} answered with status {response.status_code}"
        raise SecateurError(message)
    answer: dict[str, Any] = response.json()
    return answer


def _swap(model: str | None, base_url: str, key: str | None, *, as_json: bool) -> None:
    answer = _ask({"model": model}, base_url, key)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    old, new = answer["old"], answer["new"]
    accepted = old["accepted_per_draft"]
    told = "nothing was drafted with it" if accepted is None else f"{accepted:.2f} tokens accepted per draft"
    typer.echo(f"replica {answer['replica']}: {new['model']} drafts now, as version {new['version']}")
    typer.echo(f"before: {old['model']}, {told}")
