"""The `secateur` command: its subcommands, and how it ends.

Validation comes first and is fast; what needs Ray or torch is imported inside a command's body, after it. So are our
own modules with pydantic, httpx2 or rich: --help and the completion of a line in a shell take a fraction of a second.
Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted.
"""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import os
import warnings
from typing import Annotated

import typer

from secateur.cli.batch import batch_app
from secateur.cli.bench import bench_app
from secateur.cli.command import Command
from secateur.cli.completion import COMPLETE_VARIABLE, completion, prepare_completion
from secateur.cli.drafter import drafter_app
from secateur.cli.serving import plan, serve
from secateur.cli.setup import download, env
from secateur.cli.talking import chat, complete
from secateur.cli.top import top
from secateur.cli.usage import Group, UsageError, show_error
from secateur.errors import BatchError, ConfigError, SecateurError

# rich's tables would fold the examples, and its tracebacks would bury our one-line errors.
app = typer.Typer(
    name="secateur",
    cls=Group,
    help="Serve language models with tree speculative decoding, and talk to such a service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (serve, plan, download, complete, chat, top, env, completion):
    app.command(cls=Command)(command)
app.add_typer(batch_app, name="batch")
app.add_typer(bench_app, name="bench")
app.add_typer(drafter_app, name="drafter")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Handle the options that stand before any subcommand."""
    if version:
        from secateur import __version__

        typer.echo(__version__)
        raise typer.Exit


def main(argv: list[str] | None = None, own: typer.Typer = app) -> int:
    """Run a command line; errors become one message on stderr and an exit code, warnings a line each."""
    if COMPLETE_VARIABLE in os.environ:
        prepare_completion()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = own(args=argv, prog_name="secateur" if own is app else None, standalone_mode=False)
    except SystemExit as end:
        code = end.code
    except UsageError as error:
        show_error(error)
        return 2
    except (ConfigError, BatchError) as error:
        return _fail(error, 2)
    except SecateurError as error:
        return _fail(error, 1)
    except typer.Abort:
        return _fail("standard input ended", 1)
    return code if isinstance(code, int) else 0


def _warn(message: Warning | str, *_args: object, **_options: object) -> None:
    typer.echo(f"secateur: warning: {message}", err=True)


def _fail(error: Exception | str, code: int) -> int:
    typer.echo(f"secateur: error: {error}", err=True)
    return code
