"""The class of all commands: options in groups, several numbers at once, and vLLM's spellings of options.

- `--nodes 4 8` and `--nodes 4,8` are `--nodes 4 --nodes 8`; after all arguments, words are repeated like that, too.
- `--max_model_len` is `--max-model-len`; `--model X` is X where the model is an argument.
- `--speculative-config.num_speculative_tokens 3` sets one key of a JSON option; `key+ value` appends to a list.
- Unknown options are all named in one error, with the nearest known one, or what replaces an option of vLLM.
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from typing import Any

from typer.core import TyperCommand

from secateur.errors import SecateurError
from secateur.flags import SPECULATIVE_KEYS
from secateur.settings import SpeculativeSettings
from secateur.vllm_names import NEEDLESS, SHORT_NAMES, advice_about, project_of

GROUPS = ("Arguments", "Options", "Sampling", "Model", "Speculation", "Limits", "Serving")
"""The order of the sections of --help."""
_JSON_OPTION = "--speculative-config"
_TEXTS = ("--stop",)
"""Options of free text, in which a comma is a comma."""
_SPECULATIVE_KEYS = frozenset(SpeculativeSettings.__annotations__)


class Command(TyperCommand):
    """A command of `secateur`; see the module."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite what is spelt otherwise, then parse as usual."""
        # A line that is being completed in a shell may be wrong still.
        return super().parse_args(ctx, args if ctx.resilient_parsing else _Rewriter(self, ctx).rewritten(args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of options; typer has groups in its rich output only."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                groups[title].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Rewriter:
    """Rewrites the arguments of one call."""

    def __init__(self, command: Command, ctx: Any) -> None:
        self._ctx = ctx
        params: list[Any] = command.get_params(ctx)
        options = [param for param in params if param.param_type_name == "option"]
        self._options = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
        self._shown = sorted(
            name for name, option in self._options.items() if name.startswith("--") and not option.hidden
        )
        self._num_arguments = len(params) - len(options)
        self._takes_model = any(param.name == "model" and param.param_type_name == "argument" for param in params)
        self._json: dict[str, Any] = {}
        self._problems: list[str] = []  # with options that there are not

    def rewritten(self, args: list[str]) -> list[str]:
        found: list[str] = []
        rest = deque(args)
        repeatable = ""  # the option that further numbers belong to
        num_given = 0  # arguments; when all are given, further words belong to the option as well
        while rest:
            arg = rest.popleft()
            is_more = num_given == self._num_arguments and repeatable not in _TEXTS and not arg.startswith("-")
            if repeatable and (_is_number(arg) or is_more):
                found += _repeated(repeatable, arg)
                continue
            repeatable = ""
            if arg == "--":
                found += [arg, *rest]
                break
            if not arg.startswith("-") or arg == "-" or _is_number(arg):
                num_given += 1
                found.append(arg)
                continue
            name, equals, value = arg.partition("=")
            name, dot, path = _spelt(name).partition(".")
            if dot:
                self._set_key(name, path, value if equals else self._next(rest, arg))
            elif name == "--model" and self._takes_model:
                num_given += 1
                found.append(value if equals else self._next(rest, arg))
            elif (option := self._options.get(name)) is None:
                if not self._is_foreign(name):
                    found.append(arg)  # several short options in one, for the parser to judge
            else:
                repeatable = name if option.multiple else ""
                if repeatable and (equals or rest):
                    found += _repeated(name, value if equals else rest.popleft())
                    continue
                found.append(name + equals + value)
                if not (equals or option.is_flag) and rest:
                    found.append(rest.popleft())
        if self._problems:
            self._ctx.fail("\n".join(self._problems))
        return found + ([SPECULATIVE_KEYS, json.dumps(self._json)] if self._json else [])

    def _next(self, rest: deque[str], arg: str) -> str:
        if not rest:
            self._ctx.fail(f"{arg}: a value is missing; write it after the option")
        return rest.popleft()

    def _set_key(self, name: str, path: str, text: str) -> None:
        """Set one key of a JSON option."""
        option = self._options.get(name)
        if option is None or _JSON_OPTION not in option.opts:
            if option is not None or not self._is_foreign(name):
                self._problems.append(f"{name}.{path}: {name} holds no keys; only {_JSON_OPTION} does")
            return
        value, key = _parsed(text), path.removesuffix("+").replace("-", "_")
        if path.endswith("+"):
            value = self._json.get(key, []) + text.split(",")
        elif self._json.get(key, value) != value:
            self._ctx.fail(f"{name}.{path} is given twice, as {self._json[key]!r} and {value!r}; keep one")
        self._json[key] = value

    def _is_foreign(self, name: str) -> bool:
        """Return whether an option is none of ours, and remember what to write instead.

        What a flag of vLLM switches on may be so in any case: then a warning is enough.
        """
        if name in self._options or not (name.startswith("--") or name[:2] == "-O" or name in SHORT_NAMES):
            return False
        advice = advice_about(name)
        if name in NEEDLESS:
            warnings.warn(f"{name}: {advice}", stacklevel=2)
        elif advice is not None:
            self._problems.append(f"{name} is an option of {project_of(name)} that Secateur does not have: {advice}")
        elif _JSON_OPTION in self._options and name[2:].replace("-", "_") in _SPECULATIVE_KEYS:
            self._problems.append(f"{name} is a key of the drafter: write {_JSON_OPTION}.{name[2:]}")
        else:
            self._problems.append(f"there is no option {name}{self._nearest(name)}")
        return True

    def _nearest(self, name: str) -> str:
        from difflib import get_close_matches  # only where something is wrong

        near = get_close_matches(name, self._shown, n=1, cutoff=0.7)
        near += [option for option in self._shown if option.endswith(name[1:])]
        return f" (did you mean {near[0]}?)" if near else ""


def _spelt(name: str) -> str:
    """Return an option's name with dashes; the keys after its first dot stay as they are."""
    option, dot, path = name.partition(".")
    return option.replace("_", "-") + dot + path


def _parsed(text: str) -> Any:
    """Return a key's value: JSON, a number such as 1k, or the text itself."""
    from secateur.vllm_names import read_count

    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return read_count(text)
    except (SecateurError, ValueError):
        return text


def _repeated(name: str, text: str) -> list[str]:
    """Return the option once for each item of a list with commas; a JSON list and free text stay whole."""
    is_whole = name in _TEXTS or text.startswith("[")
    items = [text] if is_whole else [item.strip() for item in text.split(",") if item.strip()] or [text]
    return [word for item in items for word in (name, item)]


def _is_number(text: str) -> bool:
    """Return whether the text is a number, or several with commas."""
    try:
        return [float(part) for part in text.split(",") if part or text == ""] != []
    except ValueError:
        return False
