"""Plant small faults in the code, one at a time, and show those that no quick test notices: `make mutants`.

mutmut makes the mutants and runs, for each, the tests of its group that reach its function; groups.toml says which
modules and tests belong together. Everything happens in a copy of the tree under build/mutants. The same mutants of a
module are tried every time (--seed picks others), until the function that they are in changes. Survivors that cannot
matter are kept, with the reason, in explained.toml.

Exit status: 0 if every survivor is explained, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants
from mutmut.configuration import reset_config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "mutants"
SURVIVED = {"survived", "no tests", "not checked"}
_UNSEEN = re.compile(r'"[^"]* [^"]*"|\'[^\']* [^\']*\'|, (strict=\w+)?(?=\)|$)', re.MULTILINE)
"""Strings with a space, which are for people to read, and zip's `strict`, which only our own mistakes can meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules, and the quick tests that exercise them."""

    name: str
    modules: list[str]
    tests: list[str]
    per_module: int = 40
    """How many mutants of each module are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a mutant changes, without line numbers.

    Example: Change(module="workers/sampling/philox.py", removed=("k0 = seed & _MASK",), added=("k0 = seed | _MASK",))
    """

    module: str
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @classmethod
    def of_diff(cls, module: str, diff: str) -> Change:
        """Changed lines are compared without indentation; headers and context are not."""
        lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
        removed, added = (tuple(x[1:].strip() for x in lines if x.startswith(mark)) for mark in "-+")
        return cls(module=module, removed=removed, added=added)

    @property
    def is_noise(self) -> bool:
        """Whether nothing differs but the words of a message, the case of letters or zip's `strict`."""
        old, new = "\n".join(self.removed), "\n".join(self.added)
        return old.casefold() == new.casefold() or _UNSEEN.sub("", old) == _UNSEEN.sub("", new)

    def is_among(self, explained: set[Change]) -> bool:
        """Whether it is explained itself, or whatever may become of its lines is."""
        return self in explained or replace(self, added=()) in explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    name: str  # mutmut's
    change: Change
    diff: str
    verdict: str  # one of mutmut's


def read_groups(modules: list[str]) -> list[Group]:
    """The groups, reduced to the modules asked for; all if there are none."""
    groups = [
        Group(name=name, **group | {"modules": [m for m in group["modules"] if m in modules or not modules]})
        for name, group in tomllib.loads((HERE / "groups.toml").read_text()).items()
        if name != "moved"
    ]
    if unknown := set(modules) - {module for group in groups for module in group.modules}:
        raise SystemExit(f"groups.toml has no module {', '.join(sorted(unknown))}")
    return [group for group in groups if group.modules]


def read_moved() -> dict[str, str]:
    """Former paths of modules, by their paths."""
    moved: dict[str, str] = tomllib.loads((HERE / "groups.toml").read_text())["moved"]
    return moved


def read_explained() -> set[Change]:
    """Entries whose lines are gone explain nothing any more, and are named."""
    changes = set()
    for entry in tomllib.loads((HERE / "explained.toml").read_text()).get("mutant", []):
        change = Change.of_diff(entry["module"], entry["diff"])
        if not all(line in (ROOT / change.module).read_text() for line in change.removed):
            print(f"explained.toml: {change.module} has no such lines any more: {change.removed}")
        changes.add(change)
    return changes


def try_mutants(group: Group, asked: argparse.Namespace) -> list[Tried]:
    """Copy the tree, let mutmut write a group's mutants into the copy, and run it on a sample of them."""
    folder = WORK / group.name
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=ignored)
    own = {"only_mutate": group.modules, "pytest_add_cli_args_test_selection": group.tests}
    table = "[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in own.items())
    settings = folder / "pyproject.toml"
    settings.write_text(settings.read_text().replace("[tool.mutmut]\n", table))
    os.chdir(folder)  # mutmut writes into ./mutants
    reset_config()
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        with redirect_stdout(file):
            copy_src_dir()
            copy_also_copy_files()
            create_mutants(asked.jobs)
        count = asked.per_module or group.per_module
        names = [name for module in group.modules for name in sample(module, count, asked.seed)]
        print(f"{group.name}: {len(names)} mutants; progress is in {log}", flush=True)
        command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(asked.jobs), *names]
        if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode:
            raise SystemExit(f"mutmut stopped; the end of {log} says why")
    return [tried for module in group.modules for tried in verdicts(module, names)]


def sample(module: str, count: int, seed: str) -> list[str]:
    """Up to `count` mutants of a module, in an order that a move and changes of other functions leave alone."""
    now, once = (path.removesuffix(".py").replace("/", ".") for path in (module, read_moved().get(module, module)))

    def order(name: str) -> bytes:
        return sha256(f"{seed} {once}{name.removeprefix(now)}".encode()).digest()

    chosen: list[str] = []
    for name in sorted(mutants_of(module), key=order):
        if len(chosen) == count:
            break
        if not Change.of_diff(module, get_diff_for_mutant(name, path=module)).is_noise:
            chosen.append(name)
    return chosen


def mutants_of(module: str) -> dict[str, int | None]:
    """The exit status of the tests by mutmut's name of the mutant."""
    data = SourceFileMutationData(path=Path(module))
    data.load()
    return data.exit_code_by_key


def verdicts(module: str, names: list[str]) -> list[Tried]:
    tried = []
    for name, code in mutants_of(module).items():
        if name in names:
            diff = get_diff_for_mutant(name, path=module)
            change = Change.of_diff(module, diff)
            tried.append(Tried(name=name, change=change, diff=diff, verdict=status_by_exit_code[code]))
    return tried


def report(tried: list[Tried], explained: set[Change]) -> int:
    """Print a table and the survivors that are not explained; return how many there are."""
    print(f"\n{'':28}mutants  killed  timed out  survived  explained")
    surprises = [one for one in tried if one.verdict in SURVIVED and not one.change.is_among(explained)]
    for module in dict.fromkeys(one.change.module for one in tried):
        own = [one for one in tried if one.change.module == module]
        count = Counter(one.verdict for one in own)
        survived = sum(count[verdict] for verdict in SURVIVED)
        new = sum(one in surprises for one in own)
        killed = len(own) - survived - count["timeout"]
        print(f"{module:28}{len(own):7}{killed:8}{count['timeout']:11}{survived:10}{survived - new:11}")
    for one in surprises:
        print(f"\n{one.name}: {one.verdict}\n{one.diff}")
    print(flush=True)
    return len(surprises)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="such as verifier/request.py; all of groups.toml if there are none")
    parser.add_argument("--per-module", type=int, help="mutants of each module [those of its group]")
    parser.add_argument("--seed", default="0", help="another one picks other mutants [%(default)s]")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side [%(default)s]")
    asked = parser.parse_args()
    explained = read_explained()
    surprises = sum(report(try_mutants(group, asked), explained) for group in read_groups(asked.modules))
    print(f"{surprises} mutants survived without an explanation")
    return 1 if surprises else 0


if __name__ == "__main__":
    raise SystemExit(main())
