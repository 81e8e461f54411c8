"""Options that several commands share; engine flags are in `secateur.flags`."""

from typing import Annotated

import typer

from secateur.logs import Level, set_log_level

ModelArgument = Annotated[
    str | None, typer.Argument(help="Folder, GGUF file, Hugging Face id or smollm2 [the bundled model].")
]
BaseUrl = Annotated[
    str | None, typer.Option("--base-url", help="A running service [one at http://127.0.0.1:8000, else started here].")
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="Default: the environment's SECATEUR_API_KEY, which `ps` does not show."),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="The model to start [the bundled one]; with --base-url, its name there."),
]
LogLevel = Annotated[
    Level | None,
    typer.Option(
        "--log-level",
        callback=set_log_level,
        help="What this command and its processes log to stderr [info for an engine, warning for the rest].",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result to stdout as JSON.")]
