"""The result of a benchmark: rows of named tables, as JSON and as Markdown."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secateur.errors import ConfigError, Problem

Say = Callable[[str], None]
Row = dict[str, Any]


class Report:
    """The tables of one benchmark, written to OUTPUT/DATE-NAME.json and .md.

    Every row is a line of the JSON, so that two runs are easy to compare, and of a Markdown table, whose columns are
    the fields. Columns without any value and those of lists are in the JSON alone. Numbers are rounded to four
    significant digits, for more is noise.
    """

    def __init__(self, stem: Path, title: str, about: Mapping[str, object]) -> None:
        self.stem, self.title = stem, title
        self.about = {"date": datetime.date.today().isoformat(), **about}
        self.tables: dict[str, list[Row]] = {}

    def add(self, table: str, row: Any) -> Row:
        """Append a row, a mapping or a dataclass; return it as it will be written."""
        written = rounded(dict(row) if isinstance(row, Mapping) else asdict(row))
        self.tables.setdefault(table, []).append(written)
        return written

    @property
    def json(self) -> str:
        """{"about": {...}, table: [row, ...], ...}."""
        parts = [f' "about": {json.dumps(self.about)}']
        for name, rows in self.tables.items():
            lines = ",\n  ".join(map(json.dumps, rows))
            parts.append(f' "{name}": [\n  {lines}\n ]')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @property
    def markdown(self) -> str:
        """Title, settings and tables."""
        shown = {name: value for name, value in self.about.items() if name != "notes" and value is not None}
        notes: Any = self.about.get("notes") or ()
        about = [*(f"- {name}: {value}" for name, value in shown.items()), *(f"- {note}" for note in notes)]
        tables = [f"## {name.capitalize()}\n\n{_table(rows)}" for name, rows in self.tables.items()]
        return "\n\n".join([f"# {self.title.capitalize()}\n\n" + "\n".join(about), *tables]) + "\n"

    def write(self) -> None:
        """Write both files; without any row, remove them."""
        with_rows = any(self.tables.values())
        for suffix, text in ((".json", self.json), (".md", self.markdown)):
            if with_rows:
                self.stem.with_suffix(suffix).write_text(text)
            else:
                self.stem.with_suffix(suffix).unlink(missing_ok=True)


@contextmanager
def reporting(output: Path, name: str, about: Mapping[str, object], say: Say, *marks: str | None) -> Iterator[Report]:
    """Yield an empty report, and write it at the end; after an error or Ctrl-C, with the rows so far.

    marks: parts of the file name after NAME. Raises ConfigError if `output` cannot be written.
    """
    report = Report(unused_stem(output, name, *marks), name, about)
    try:
        yield report
    finally:
        report.write()
    say(f"the results are in {report.stem}.json and .md")


def unused_stem(output: Path, name: str, *marks: str | None) -> Path:
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


def _table(rows: Sequence[Row]) -> str:
    """Return a Markdown table, and above it a line of what is the same in all of several rows."""
    values = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    shown = {name: column for name, column in values.items() if any(_cell(value) for value in column)}
    same = {name: column[0] for name, column in shown.items() if len(rows) > 2 and column.count(column[0]) == len(rows)}
    varied = {name: column for name, column in shown.items() if name not in same}
    above = (
        "Everywhere: " + ", ".join(f"{_title(name, [value])} {_cell(value)}" for name, value in same.items()) + ".\n\n"
    )
    titles = [_title(name, column) for name, column in varied.items()]
    lines = [[_cell(value) for value in line] for line in zip(*varied.values(), strict=True)]
    return (above if same else "") + markdown(titles, lines)


def _title(name: str, column: Sequence[Any]) -> str:
    first = next(value for value in column if value is not None)
    return name.replace("_", " ") + (f": {', '.join(first)}" if isinstance(first, dict) else "")


def _cell(value: object) -> str:
    match value:
        case None | list():
            return ""
        case dict():
            return ", ".join(map(_cell, value.values()))
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)


def markdown(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def rounded(value: Any) -> Any:
    """Round all numbers in a value to four significant digits."""
    match value:
        case dict():
            return {key: rounded(inner) for key, inner in value.items()}
        case list() | tuple():
            return [rounded(inner) for inner in value]
        case float():
            return float(f"{value:.4g}")
        case _:
            return value
