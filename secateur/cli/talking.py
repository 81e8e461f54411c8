"""`secateur complete` and `secateur chat`: talk to a running service, or to one started for this command."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from secateur.cli.checks import check_none_given, checked
from secateur.cli.options import ApiKey, BaseUrl, LogLevel, ModelName
from secateur.errors import ConfigError
from secateur.flags import with_engine_flags, with_sampling_flags
from secateur.install import service_part

Stats = Annotated[bool, typer.Option("--stats", help="Print acceptance length and speed to stderr at the end.")]
ShowTrees = Annotated[
    bool, typer.Option("--show-trees", help="Draw the tree of each step; the text follows at the end.")
]
_HEALTH_TIMEOUT_S = 2.0
AsJson = Annotated[bool, typer.Option("--json", help="Print the service's whole answer, as one line of JSON.")]


@with_engine_flags(server=False)
@with_sampling_flags()
def complete(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input, as it is.")],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    model: ModelName = None,
    stats: Stats = False,
    as_json: AsJson = False,
    show_trees: ShowTrees = False,
    log_level: LogLevel = None,
) -> None:
    r"""Continue a text, streaming to stdout.

    Example: secateur complete "def quicksort(items):" --max-tokens 64 --temperature 0 --stats

    Example: secateur complete - --stop $'\ndef ' --json < unfinished.py
    """
    from secateur.client import Client

    params, prompt = _params(sampling, model if base_url else None), _typed_or_piped(prompt)
    with _service(engine, base_url, model, api_key) as url, Client(url, api_key=api_key) as client:
        if as_json:
            _print_json(partial(client.complete, prompt), params, stats, show_trees)
        else:
            _print_stream(partial(client.stream_complete, prompt), params, stats, show_trees)


@with_engine_flags(server=False)
@with_sampling_flags()
def chat(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    message: Annotated[
        str | None,
        typer.Argument(help="One message, - reads it from standard input; without it a conversation starts."),
    ] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option("--system", help="Instructions before the conversation.")] = None,
    stats: Stats = False,
    as_json: AsJson = False,
    show_trees: ShowTrees = False,
    log_level: LogLevel = None,
) -> None:
    """Chat with a model: one message, or a conversation (Ctrl-D ends it).

    Example: secateur chat "Write a loop over a list." --base-url http://127.0.0.1:8000
    """
    from secateur.client import Client

    params, message = _params(sampling, model if base_url else None), message and _typed_or_piped(message)
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    with _service(engine, base_url, model, api_key) as url, Client(url, api_key=api_key) as client:
        while (text := message if message is not None else _next_message()) is not None:
            turns.append({"role": "user", "content": text})
            if as_json:
                answer = _print_json(partial(client.chat, turns), params, stats, show_trees)
            else:
                answer = _print_stream(partial(client.stream_chat, turns), params, stats, show_trees)
            turns.append({"role": "assistant", "content": answer})
            if message is not None:
                return


def _typed_or_piped(text: str) -> str:
    """Return the text, or all of standard input for a dash. Raises ConfigError."""
    if text != "-":
        return text
    if sys.stdin is None:
        raise ConfigError("standard input is closed; type the prompt, or pipe it in")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _params(sampling: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Return the fields of the request. Raises ConfigError."""
    from secateur.requests import check_sampling

    fields = {**sampling, "stop": sampling["stop"] or None}
    check_sampling(fields)
    return {"model": model, **fields}


def _service(
    engine: dict[str, Any], base_url: str | None, model: str | None, api_key: str | None
) -> AbstractContextManager[str]:
    """Return a context with the URL of a running service, or of one that runs as long as the context.

    Without a URL, a service at the default address is asked, unless a flag says what to start.
    """
    if base_url is not None:
        check_none_given(engine)
        return nullcontext(base_url)
    if model is None and not any(value is not None for value in engine.values()):
        from secateur.client import DEFAULT_BASE_URL

        if _answers(DEFAULT_BASE_URL):
            typer.echo(f"secateur: asking the service at {DEFAULT_BASE_URL}", err=True)
            return nullcontext(DEFAULT_BASE_URL)
        typer.echo(f"secateur: no service at {DEFAULT_BASE_URL}; starting an engine for this command", err=True)
    args = checked(engine, model=model, port=0, api_key=api_key)
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    if has_terminal and find_spec("torch"):  # without it, print the error alone
        typer.echo("secateur: importing PyTorch", err=True)
    service: AbstractContextManager[str] = service_part("local_service", or_base_url=True)(
        args, shows_progress=has_terminal
    )
    return service


def _answers(base_url: str) -> bool:
    """Return whether a service at this address is ready."""
    import httpx2

    try:
        return httpx2.get(f"{base_url}/health", timeout=_HEALTH_TIMEOUT_S, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def _print_json(ask: Callable[..., Any], params: dict[str, Any], stats: bool, show_trees: bool) -> str:
    """Write the whole answer to stdout as one line, and return its text."""
    started = time.monotonic()
    answer = ask(**params, **_extensions(stats, show_trees))
    sys.stdout.write(answer.model_dump_json() + "\n")
    sys.stdout.flush()
    if stats:
        typer.echo(_stats_line(answer.usage, answer.speculative, time.monotonic() - started), err=True)
    text: str = answer.text
    return text


def _print_stream(ask: Callable[..., Generator[Any]], params: dict[str, Any], stats: bool, show_trees: bool) -> str:
    """Write chunks to stdout as they arrive, or trees as they arrive and then the text; return the whole text."""
    from secateur.cli.trees import draw_tree

    started, parts, usage, speculation = time.monotonic(), [], None, None
    asked = {**_extensions(stats, show_trees), **({"stream_options": {"include_usage": True}} if stats else {})}
    num_steps = 0
    for chunk in ask(**params, **asked):
        if not show_trees:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        for tree in (chunk.choices[0].speculative_trees if chunk.choices else None) or ():
            num_steps += 1
            # Without a terminal, echo leaves out the colours.
            typer.echo("\n".join([*draw_tree(tree, num_steps), ""]), color=False if "NO_COLOR" in os.environ else None)
        parts.append(chunk.text)
        usage, speculation = chunk.usage or usage, chunk.speculative or speculation
    sys.stdout.write("".join(parts) + "\n" if show_trees else "\n")
    if stats:
        typer.echo(_stats_line(usage, speculation, time.monotonic() - started), err=True)
    return "".join(parts)


def _extensions(stats: bool, show_trees: bool) -> dict[str, Any]:
    """Return the fields that ask for more than the answer."""
    asked = {"return_speculative_stats": stats, "return_speculative_trees": show_trees}
    return {name: True for name, is_asked in asked.items() if is_asked}


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
    """Return the next line of input, or None at its end."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if text.strip():
            return text
