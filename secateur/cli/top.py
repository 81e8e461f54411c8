"""`secateur top`: a live view of a running service; `secateur.top` makes the figures."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from secateur.cli.options import AsJson

if TYPE_CHECKING:
    from secateur.top import Reading, ReplicaView


def top(
    base_url: Annotated[str, typer.Option("--base-url", help="The running service.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two reads.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, print one view, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a running service does: requests, KV pages, tokens/s, acceptance, nodes and time per step.

    Reads /metrics, which needs no API key, until Ctrl-C. With several replicas, each is shown once a read has reached
    it. With --json, a line is an object with the views of all replicas.

    Example: secateur top --base-url http://127.0.0.1:8000 --once
    """
    from secateur.client import check_base_url
    from secateur.errors import APIConnectionError
    from secateur.top import Watch

    check_base_url(base_url)
    watch = Watch()
    views = watch.take(_read(base_url))
    with contextlib.suppress(KeyboardInterrupt), _screen(is_live=not (once or as_json)) as show:
        if not once:
            show(_text(views, as_json=as_json))
        while True:
            time.sleep(interval)
            try:
                views = watch.take(_read(base_url))
            except APIConnectionError as error:
                if once or as_json:
                    raise
                show(f"{_text(views, as_json=False)}\n\n{error}; trying again")
                continue
            show(_text(views, as_json=as_json))
            if once:
                return


def _read(base_url: str) -> "list[Reading]":
    """Read /metrics. Raises SecateurError."""
    import httpx2

    from secateur.errors import APIConnectionError, SecateurError
    from secateur.top import readings_of

    try:
        response = httpx2.get(f"{base_url.rstrip('/')}/metrics", timeout=10.0)
    except httpx2.HTTPError as error:
        raise APIConnectionError(f"no answer from {base_url}: {error}") from None
    if response.is_error:
        raise SecateurError(f"{base_url}/metrics answered with status {response.status_code}")
    return readings_of(response.text)


def _text(views: "list[ReplicaView]", *, as_json: bool) -> str:
    from secateur.top import lines_of_view

    if as_json:
        return json.dumps({"replicas": [asdict(view) for view in views]})
    return "\n\n".join("\n".join(lines_of_view(view)) for view in views)


@contextlib.contextmanager
def _screen(*, is_live: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows a text: on a terminal in place of the last one, elsewhere below it."""
    if not (is_live and sys.stdout.isatty()):
        yield typer.echo
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda text: live.update(Text(text), refresh=True)
