"""Reports what is wrong in a command line as all errors are: what it is about, and what to write instead."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperGroup

from secateur.vllm_names import COMMANDS

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Base of what the parser raises. Typer has it from click or from a copy of click, and exports it under no name."""


class Group(TyperGroup):
    """The commands below `secateur`, or below one of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. An unknown one is answered with what to write."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError:
            if args[0].startswith("-") or ctx.resilient_parsing:
                raise
            ctx.fail(self._instead_of(args[0], is_root=ctx.parent is None))

    def _instead_of(self, name: str, *, is_root: bool) -> str:
        from secateur.schema import did_you_mean

        if is_root and name in COMMANDS:
            return f"there is no command {name!r}: {COMMANDS[name]}"
        if is_root and "/" in name:
            return f"there is no command {name!r}; to serve that model, write `secateur serve {name}`"
        shown = [name for name, command in self.commands.items() if not command.hidden]
        return f"there is no command {name!r}{did_you_mean(name, shown)}"


def show_error(error: Any) -> None:
    """Write the parser's error to stderr; where a command alone was typed, its help."""
    is_help = type(error).__name__ == "NoArgsIsHelpError"
    typer.echo(error.message if is_help else f"secateur: error: {_text_of(error)}", err=True)


def _text_of(error: Any) -> str:
    """Return the parser's error with the name of what is wrong in front, and a line that points to the help."""
    context, message = error.ctx, _message_of(error)
    return message if context is None else f"{message}\nSee `{context.command_path} --help`."


def _message_of(error: Any) -> str:
    match type(error).__name__:
        case "MissingParameter":
            return _missing(error)
        case "BadParameter":
            return f"{_name_of(error.param)}: {_value_problem(error)}" if error.param else str(error.message)
        case "NoSuchOption" if error.ctx is not None and isinstance(error.ctx.command, Group):
            return f"{error.option_name}: only --version and --help stand before a command; write others after it"
    message = str(error.message)
    if match := re.fullmatch(r"Option '(.+)' requires an argument\.", message):
        return f"{match[1]}: a value is missing; write it after the option"
    if match := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return f"{match[1]}: more arguments than the command takes; remove it, or quote a text that has spaces"
    return message


def _missing(error: Any) -> str:
    """Return the error for an argument, or a required option, that is missing."""
    param = error.param
    is_option = param.param_type_name == "option"
    shown = f"{_name_of(param)} {param.metavar or 'VALUE'}" if is_option else param.metavar or param.name.upper()
    return f"{_name_of(param)} is missing; write `{error.ctx.command_path} {'... ' * is_option}{shown}`"


def _name_of(param: Any) -> str:
    """Return the long name of an option, or the name of an argument."""
    return max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or str(param.name)


def _value_problem(error: Any) -> str:
    """Return what is wrong with a value. The parser's own text, of pydantic, does not name the value."""
    from pydantic import ValidationError

    from secateur.schema import problems_of

    if not isinstance(error.__cause__, ValidationError):
        return str(error.message)
    return problems_of(error.__cause__, ())[0].message.rstrip(".")
