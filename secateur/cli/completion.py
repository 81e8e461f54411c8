"""`secateur completion`: scripts with which shells complete command lines; typer writes and answers them."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
from enum import StrEnum
from typing import Annotated

import typer

COMPLETE_VARIABLE = "_SECATEUR_COMPLETE"
"""The scripts call `secateur` with this variable in the environment, to ask how a line may go on."""


class Shell(StrEnum):
    """Shells that can complete."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to write it for.")]) -> None:
    """Print a script that completes commands, options and their values in a shell.

    In ~/.bashrc: eval "$(secateur completion bash)". In ~/.zshrc, after compinit: eval "$(secateur completion zsh)".
    For fish: secateur completion fish > ~/.config/fish/completions/secateur.fish

    Example: secateur completion bash
    """
    from typer.completion import get_completion_script

    typer.echo(get_completion_script(prog_name="secateur", complete_var=COMPLETE_VARIABLE, shell=shell.value))


def prepare_completion() -> None:
    """Register the shells of typer's scripts; without this, those of click's would be expected."""
    from typer.completion import completion_init

    completion_init()
