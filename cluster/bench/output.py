"""The result files of a benchmark, their header and their Markdown."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.install import install_command
from workers.config import EngineConfig

Say = Callable[[str], None]
About = Mapping[str, object]


def stem_of(output: Path, name: str, *marks: str | None) -> Path:
    """Return an unused OUTPUT/DATE-name-mark..., with -2, -3, ... if there is one from today already.

    Creates the folder, and an empty STEM.json that reserves the name. Raises ConfigError.
    """
    first = "-".join([datetime.date.today().isoformat(), name, *(mark for mark in marks if mark)])
    try:
        output.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            stem = output / (first if number == 1 else f"{first}-{number}")
            with contextlib.suppress(FileExistsError):
                stem.with_suffix(".json").touch(exist_ok=False)
                return stem
    except OSError as error:
        raise ConfigError(Problem("--output", f"cannot write {output}: {error.strerror}")) from None
    raise AssertionError("unreachable")


def about(args: EngineArgs, config: EngineConfig, plan: Mapping[str, object], notes: Sequence[str]) -> About:
    """Return the header: settings, versions and hardware."""
    import torch
    import transformers

    spec = args.speculative_config
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(config),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": args.model,
        "target": target_label(plan),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "speculative_config": spec.model_dump(exclude_unset=True) if spec else None,
        **plan,
        "notes": list(notes),
    }


def device_mark(config: EngineConfig) -> str | None:
    """Return the device's part of the file name; none on CPU."""
    return "cuda" if config.device == "cuda" else None


def target_label(plan: Mapping[str, object]) -> str:
    """Describe the target: unchanged, or scaled to the cost of a larger model."""
    cost = plan.get("target_cost")
    return f"cost-scaled (same function as the bundled target, cost of a {cost} model)" if cost else "as it is"


def _threads(config: EngineConfig) -> str:
    number, alone = config.threads, config.threads_alone
    if number != alone:
        return f"threads per verifier rank: {number}, {alone} in steps that ask nothing of the drafter"
    return "one thread per process" if number == 1 else f"{number} threads per verifier rank"


def hardware(config: EngineConfig) -> str:
    """Describe the hardware that the engine runs on."""
    if config.device == "cpu":
        return f"{os.cpu_count()} CPU cores, {platform.machine()}, {_threads(config)}"
    import torch

    shared = ", drafter on the verifier's" if config.draft and config.draft.placement == "colocated" else ""
    count = config.tensor_parallel_size + (0 if shared else config.draft_ranks)
    return f"{count} x {torch.cuda.get_device_name()}{shared}"


def write_json(stem: Path, head: About, tables: Mapping[str, Sequence[Mapping[str, object]]]) -> None:
    """Write STEM.json: {"about": {...}, table: [row, ...]}, one row per line so that two runs are easy to compare.

    Without any row, the file is removed.
    """
    if not any(tables.values()):
        stem.with_suffix(".json").unlink()
        return
    parts = [f' "about": {json.dumps(head)}']
    for name, rows in tables.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        parts.append(f' "{name}": [\n  {lines}\n ]')
    stem.with_suffix(".json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


def write_text(stem: Path, text: str, *, as_json: bool) -> str:
    """Write STEM.md; return its text for the terminal, or with `as_json` that of STEM.json."""
    stem.with_suffix(".md").write_text(text)
    return stem.with_suffix(".json").read_text() if as_json else text


def draw(say: Say, stem: Path, plot: str, *args: object) -> None:
    """Call a function of `cluster.bench.plots`, or print a hint if matplotlib is not installed."""
    try:
        plots = importlib.import_module("cluster.bench.plots")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        say(f"the results are in {stem}.json and .md; their plots need matplotlib: {install_command('bench')}")
    else:
        getattr(plots, plot)(*args, stem)
        say(f"the results are in {stem}.json and .md, with their plots beside them")


def heading(title: str, about: About, hidden: Iterable[str] = ()) -> str:
    """Return title, settings and notes in Markdown; settings of None are left out."""
    shown = {name: value for name, value in about.items() if name not in (*hidden, "notes") and value is not None}
    lines = [f"- {name}: {value}" for name, value in shown.items()]
    notes = about.get("notes")
    lines += [f"- {note}" for note in notes] if isinstance(notes, list) else []
    return f"# {title}\n\n" + "\n".join(lines)


def markdown(header: Sequence[str], lines: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def rounded(value: float) -> float:
    """Round to four significant digits; more is noise."""
    return float(f"{value:.4g}")
