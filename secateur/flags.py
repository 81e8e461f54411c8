"""Flags that commands share, and how flags, a `--config` file and defaults become EngineArgs.

The flags of an engine are made from the fields of `secateur.settings`.
Precedence: flag, then file, then default. Flags for single keys of the speculative configuration (pruning, and
`--speculative-config.KEY`) are merged into it; two flags of one command line that contradict each other are an error.
"""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import contextlib
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from secateur.errors import ConfigError, Problem
from secateur.settings import (
    ALL_THRESHOLDS,
    SERVING,
    SPECULATION,
    TREE_RULES,
    EngineSettings,
    Setting,
    SpeculativeSettings,
    settings_of,
)
from secateur.vllm_names import in_our_words

if TYPE_CHECKING:  # pydantic takes longer to import than --help may take
    from secateur.config import EngineArgs


SPECULATIVE_KEYS = "--speculative-config-keys"
"""A hidden flag: `--speculative-config.KEY VALUE` arrives as an object of these keys, see `secateur.cli.command`."""


def _flag(kind: Any, *names: str, help: str, **extra: Any) -> Any:
    # EngineArgs alone checks ranges, so that every error has one wording; flags have no bounds or defaults.
    return Annotated[kind | None, typer.Option(*names, help=help, **extra)]


def _flags_of(settings: dict[str, Setting]) -> dict[str, Any]:
    return {name: _flag_of(name, setting) for name, setting in settings.items()}


def _flag_of(name: str, setting: Setting) -> Any:
    flag, long = setting.flag, "--" + name.replace("_", "-")
    names = [long if setting.default is not True else f"{long}/--no-{long.removeprefix('--')}"]
    names += [flag.short] if flag.short else []
    extra = {"metavar": flag.metavar} if flag.metavar else {}
    return _flag(_kind_of(setting), *names, help=setting.text, rich_help_panel=flag.group, **extra)


def _kind_of(setting: Setting) -> Any:
    """Return the type that the parser reads."""
    flag, kind = setting.flag, setting.kinds[0]
    if any(get_origin(each) is list for each in setting.kinds):
        return list[str]
    is_choice = get_origin(kind) is Literal
    if flag.has_unit or (is_choice and flag.metavar):
        return str
    return Literal[(*get_args(kind), *flag.vllm_values)] if is_choice else kind


PRUNING = settings_of(SpeculativeSettings)
"""The keys of the speculative configuration that have flags."""
_ENGINE = settings_of(EngineSettings)
SERVER_FLAGS = _flags_of({name: setting for name, setting in _ENGINE.items() if setting.flag.group == SERVING})
ENGINE_FLAGS: dict[str, Any] = {
    "config": _flag(Path, "--config", help="YAML file of these settings; flags override it.", metavar="FILE"),
    "speculative_config": _flag(
        str,
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='How to draft, e.g. \'{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 16}\'. '
        "--speculative-config.KEY VALUE sets one key.",
        rich_help_panel=SPECULATION,
    ),
    "speculative_config_keys": _flag(str, SPECULATIVE_KEYS, hidden=True, help="See SPECULATIVE_KEYS."),
    **_flags_of(PRUNING),
    **_flags_of({name: setting for name, setting in _ENGINE.items() if name not in SERVER_FLAGS}),
}
_sampling = functools.partial(_flag, rich_help_panel="Sampling")

# The models of `secateur.requests` check ranges, here and in the service.
SAMPLING_FLAGS: dict[str, Any] = {
    "max_tokens": _sampling(int, "--max-tokens", help="The most tokens to generate [complete: 16]."),
    "temperature": _sampling(float, "--temperature", help="0 is greedy [the model's own, else 1.0]."),
    "top_p": _sampling(float, "--top-p", help="Keep the most probable tokens up to this mass."),
    "top_k": _sampling(int, "--top-k", help="Keep this many of the most probable tokens; 0 keeps all."),
    "stop": _sampling(list[str], "--stop", help="Stop before this text; repeat the flag for several.", metavar="TEXT"),
    "presence_penalty": _sampling(
        float, "--presence-penalty", help="Subtracted from the logits of tokens that occurred [0]."
    ),
    "frequency_penalty": _sampling(
        float, "--frequency-penalty", help="The same, multiplied by the number of occurrences [0]."
    ),
    "repetition_penalty": _sampling(
        float,
        "--repetition-penalty",
        help="Values above 1 make tokens that occurred less likely [the model's own, else 1].",
    ),
    "seed": _sampling(int, "--seed", help="The same seed gives the same text, near-ties apart."),
}

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def with_engine_flags(*, server: bool) -> Decorator:
    """Give a command the engine flags, as a dict argument `engine` with None for flags that were not given."""
    return with_flags("engine", {**ENGINE_FLAGS, **(SERVER_FLAGS if server else {})})


def with_sampling_flags() -> Decorator:
    """Give a command the sampling flags, as a dict argument `sampling`."""
    return with_flags("sampling", SAMPLING_FLAGS)


def with_flags(group: str, flags: dict[str, Any]) -> Decorator:
    """Give a command these flags (annotations by name), as a dict argument named `group`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            return command(**{group: {name: given.pop(name) for name in flags}}, **given)

        signature = inspect.signature(command)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name != group
        ]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in flags.items()
        ]
        run.__signature__ = signature.replace(parameters=own + more)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in own + more}
        return run

    return decorate


def engine_args_from(flags: dict[str, Any]) -> "EngineArgs":
    """Return EngineArgs from flags (None = not given), including `config`. Raises ConfigError."""
    from secateur.config import EngineArgs, read_yaml
    from secateur.schema import normalise_keys

    given = {name: _plain(value) for name, value in flags.items() if value is not None}
    settings: dict[str, Any] = {}
    if "config" in given:
        settings = in_our_words(normalise_keys(read_yaml(given.pop("config"))), EngineArgs.model_fields)
    keys = _single_keys(given)
    given = in_our_words(given, EngineArgs.model_fields)
    if "speculative_config" in given:
        given["speculative_config"] = _add(keys, normalise_keys(given["speculative_config"]))
        settings.pop("no_speculation", None)
    if given.get("no_speculation"):
        settings.pop("speculative_config", None)
    settings.update(given)
    if keys and "speculative_config" not in given:
        settings["speculative_config"] = _override(keys, _speculation_of(settings, next(iter(keys))))
    return EngineArgs.load(settings)


def _single_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Take the flags for single keys of the speculative configuration out of the given ones."""
    pruning = {name: given.pop(name) for name in PRUNING if name in given}
    return _add(pruning, json.loads(given.pop("speculative_config_keys", "{}")))


def _plain(value: Any) -> Any:
    return [item for text in value for item in _listed(text)] if isinstance(value, list) else value


def _listed(text: str) -> list[Any]:
    """Return the items of a JSON list, which vLLM's flags take, or the text itself."""
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(items := json.loads(text), list):
            return items
    return [text]


def _speculation_of(settings: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the file's speculative configuration, or the model's default, to merge single keys into."""
    from secateur.config import BUNDLED_TARGET, DEFAULT_SPECULATION
    from secateur.schema import normalise_keys

    if settings.get("no_speculation"):
        raise ConfigError(Problem(_spelt(key), "contradicts --no-speculation; keep one of the two"))
    if isinstance(found := settings.get("speculative_config"), dict):
        return normalise_keys(found)
    if default := DEFAULT_SPECULATION.get(settings.get("model", BUNDLED_TARGET)):
        return dict(default)
    if key in PRUNING:
        raise ConfigError(Problem(_spelt(key), "prunes a draft tree, but nothing drafts: add --speculative-config"))
    return {}


def _add(keys: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    """Add single keys to --speculative-config. Neither overrides the other, so they must agree."""
    for name, value in keys.items():
        if speculation.get(name, value) != value:
            other = f"{name}={speculation[name]} in --speculative-config"
            raise ConfigError(Problem(_spelt(name), f"{value} contradicts {other}; keep one"))
    return {**speculation, **keys}


def _override(keys: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    """Override a file's configuration by single keys, after expanding its single threshold into both.

    Another method or model is another drafter: of the file's keys, none stays then.
    """
    if {"method", "model"} & keys.keys():
        return keys
    base = dict(speculation)
    if (both := base.pop(ALL_THRESHOLDS, None)) is not None:
        base = dict.fromkeys(TREE_RULES, both) | base
    if ALL_THRESHOLDS in keys:
        base = {name: value for name, value in base.items() if name not in PRUNING}
    return {**base, **keys}


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-") if name in PRUNING else f"--speculative-config.{name}"
