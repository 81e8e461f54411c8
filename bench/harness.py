"""How a benchmark is run: settings of a plan and of an engine become flags, and its rows a report.

Flags, errors and exit codes are those of `secateur`. A list of numbers is `--batches 1 8`, a list of names
`--contestants off,auto`.
"""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import argparse
import shlex
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from pydantic import ConfigDict, field_validator
from pydantic.fields import FieldInfo

from bench.scaled import TargetSize, scaled_pair
from cluster.bench.report import Report, Say, reporting
from cluster.bench.setup import about, device_mark
from cluster.convert import resolve_devices, visible_gpus
from cluster.system.temp_dirs import OwnedTempDir
from secateur import cli
from secateur.cli.bench import Output, PromptsFile, Quick, given, say
from secateur.cli.checks import checked
from secateur.cli.command import Command
from secateur.cli.options import AsJson, ModelArgument
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError, Problem
from secateur.flags import with_engine_flags, with_flags
from secateur.prompts import BUNDLED_PROMPTS, BenchPrompt, read_prompts
from secateur.schema import Strict
from workers.config import EngineConfig

MAX_PROMPTS = 32
"""Most prompts that are read; further requests repeat them."""


class BenchmarkPlan(Strict):
    """Settings of a benchmark, each of which is a flag; its docstring is the flag's help."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    target_cost: str | None = None
    """Pad the target with zeros to the cost of 300m, 8b or HIDDENxLAYERS: the same function, tokens and acceptance.

    With +vTOKENS behind it, such as 8b+v128256, its vocabulary has so many tokens, and its head is as wide as it is."""
    cache: str | None = None
    """Keep the padded models in this folder [not kept]."""

    @field_validator("target_cost")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            TargetSize.parse(value)
        return value


class Run(NamedTuple):
    """One call of a benchmark."""

    args: EngineArgs
    plan: Any
    prompts: Path
    output: Path

    def texts(self, count: int) -> list[BenchPrompt]:
        """Return that many prompts, or as many as there are."""
        return read_prompts(self.prompts, min(count, MAX_PROMPTS))

    @contextmanager
    def report(self, name: str, config: EngineConfig, notes: Sequence[str], **more: object) -> Iterator[Report]:
        """Yield an empty report with the settings in its header."""
        settings = self.plan.model_dump(exclude={"cache"}) | more
        marks = (self.plan.target_cost, device_mark(config))
        with reporting(self.output, name, about(self.args, config, settings, notes), say, *marks) as found:
            yield found


def main(plan: type[BenchmarkPlan], benchmark: Callable[[Run], Report], quick: dict[str, Any]) -> None:
    """Run a benchmark with the flags of this process, and end the process.

    Args:
        plan: its settings.
        benchmark: measures; raises ConfigError before anything is started.
        quick: the settings of --quick.
    """

    @with_engine_flags(server=False)
    @with_flags("settings", flags_of(plan))
    def measure(
        engine: dict[str, Any],
        settings: dict[str, Any],
        model: ModelArgument = None,
        prompts: PromptsFile = BUNDLED_PROMPTS,
        output: Output = Path("results"),
        quickly: Quick = False,
        as_json: AsJson = False,
    ) -> None:
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # as Ctrl-C: engines are stopped, rows so far are kept
        named = {
            name: _names(value) if _is_names(plan.model_fields[name]) else value for name, value in settings.items()
        }
        chosen = plan.load((quick if quickly else {}) | given(named))
        report = benchmark(Run(checked(engine, model=model), chosen, prompts, output))
        typer.echo(report.json if as_json else report.markdown)

    measure.__doc__ = sys.modules[benchmark.__module__].__doc__
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=Command)(measure)
    sys.exit(cli.main(own=app))


def flags_of(plan: type[BenchmarkPlan]) -> dict[str, Any]:
    """Return typer's annotation for each setting of a plan; None is the default of every flag."""
    flags = {}
    for name, field in plan.model_fields.items():
        default, kind = field.get_default(call_default_factory=True), _kind(field)
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        help_ = " ".join(filter(None, [field.description, "" if default is None else f"[{shown}]"]))
        option = typer.Option("--" + name.replace("_", "-"), help=help_)
        flags[name] = Annotated[kind | None, option]
    return flags


def _kind(field: FieldInfo) -> Any:
    """Return the type that a flag is parsed as."""
    kind = field.annotation
    if isinstance(kind, types.UnionType):  # X | None
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
        return list[inner] if inner in (int, float) else str  # type: ignore[valid-type]  # typer reads it
    return kind


def _is_names(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple and _kind(field) is str


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip().replace("-", "_") for name in text.split(",")]


# -- the target ------------------------------------------------------------------------------------------------------


@contextmanager
def scaled(args: EngineArgs, cost: str | None, cache: str | Path | None, say: Say) -> Iterator[EngineArgs]:
    """Replace target and head by ones padded to `cost`; without `cache`, they are deleted after the context."""
    if cost is None:
        yield args
        return
    folder = OwnedTempDir()
    try:
        yield _with_scaled(args, TargetSize.parse(cost), Path(cache) if cache else folder.path, say)
    finally:
        folder.remove()


def _with_scaled(args: EngineArgs, size: TargetSize, folder: Path, say: Say) -> EngineArgs:
    import torch

    args = resolve_devices(args, num_gpus=visible_gpus())
    spec = args.speculative_config
    if spec is None or spec.method != "eagle3" or spec.model is None:
        raise ConfigError(Problem("--target-cost", "scales a target and its EAGLE-3 head; leave the drafter out"))
    name = args.dtype if args.dtype != "auto" else "float32" if args.device == "cpu" else "bfloat16"
    say(f"writing a target of {size} ({size.layer_parameters / 1e6:.0f} M parameters) unless {folder} holds it")
    try:
        pair = scaled_pair(
            Path(resolve_model(args.model)), Path(resolve_model(spec.model)), size, folder, getattr(torch, name)
        )
    except ValueError as error:
        raise ConfigError(Problem("--target-cost", str(error))) from error
    head = spec.model_copy(update={"model": str(pair.head)})
    return args.model_copy(update={"model": str(pair.target), "speculative_config": head})


# -- benchmarks without an engine of their own -----------------------------------------------------------------------


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--output`, for benchmarks that need no engine's flags."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=Path("results"))
    return made


def command() -> str:
    """Return the command of this process, for a report's header."""
    return f"python -m bench.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".rstrip()
