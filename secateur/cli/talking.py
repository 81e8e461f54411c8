"""`secateur complete` and `secateur chat`: talk to a running service, or to one of our own for as long as it takes."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from secateur.cli.checks import check_none_given, checked, needs_extra
from secateur.cli.options import ApiKey, BaseUrl, ModelName
from secateur.flags import with_engine_flags, with_sampling_flags

Stats = Annotated[bool, typer.Option("--stats", help="Print acceptance length and speed to stderr at the end.")]


@with_engine_flags(server=False)
@with_sampling_flags()
def complete(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    model: ModelName = None,
    stats: Stats = False,
) -> None:
    """Continue a text, streaming to stdout.

    Example: secateur complete "def quicksort(items):" --max-tokens 64 --temperature 0 --stats
    """
    from secateur.client import Client

    with _service(engine, base_url, model, api_key) as url, Client(url, api_key=api_key) as client:
        chunks = client.stream_complete(prompt, model=model if base_url else None, **sampling, **_stats_params(stats))
        _print_stream(chunks, stats)


@with_engine_flags(server=False)
@with_sampling_flags()
def chat(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    message: Annotated[str | None, typer.Argument(help="One message; without it a conversation starts.")] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option("--system", help="Instructions before the conversation.")] = None,
    stats: Stats = False,
) -> None:
    """Chat with a model: one message, or a conversation (Ctrl-D ends it).

    Example: secateur chat "Write a loop over a list." --base-url http://127.0.0.1:8000
    """
    from secateur.client import Client

    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    with _service(engine, base_url, model, api_key) as url, Client(url, api_key=api_key) as client:
        while (text := message if message is not None else _next_message()) is not None:
            turns.append({"role": "user", "content": text})
            chunks = client.stream_chat(turns, model=model if base_url else None, **sampling, **_stats_params(stats))
            turns.append({"role": "assistant", "content": _print_stream(chunks, stats)})
            if message is not None:
                return


def _service(
    engine: dict[str, Any], base_url: str | None, model: str | None, api_key: str | None
) -> AbstractContextManager[str]:
    """The service to talk to: the given one, or one of our own for as long as the context lasts."""
    if base_url is not None:
        check_none_given(engine)
        return nullcontext(base_url)
    args = checked(engine, model=model, port=0, api_key=api_key)
    try:
        from cluster.service import local_service
    except ModuleNotFoundError as error:
        raise needs_extra(error) from error
    service: AbstractContextManager[str] = local_service(args)
    return service


def _stats_params(stats: bool) -> dict[str, Any]:
    if not stats:
        return {}
    return {"return_speculative_stats": True, "stream_options": {"include_usage": True}}


def _print_stream(chunks: Generator[Any], stats: bool) -> str:
    """Write chunks to stdout as they come; returns the whole text."""
    started, parts, usage, speculation = time.monotonic(), [], None, None
    for chunk in chunks:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        parts.append(chunk.text)
        usage, speculation = chunk.usage or usage, chunk.speculative or speculation
    sys.stdout.write("\n")
    if stats:
        typer.echo(_stats_line(usage, speculation, time.monotonic() - started), err=True)
    return "".join(parts)


def _stats_line(usage: Any, speculation: Any, seconds: float) -> str:
    parts = []
    if usage is not None:
        tokens = usage.completion_tokens
        parts.append(f"{tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)")
    if speculation is not None:
        parts.append(
            f"acceptance length {speculation.acceptance_length:.2f} "
            f"({speculation.num_draft_tokens} tokens drafted, {speculation.num_verified} verified, "
            f"{speculation.num_accepted_tokens} accepted in {speculation.num_drafts} steps)"
        )
    return "; ".join(parts) or "the service sent no statistics"


def _next_message() -> str | None:
    """The next line typed, or None at the end of input."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if text.strip():
            return text
