"""Questions for a chat model, made from freely licensed texts that Python packages carry.

make_questions(count, seed) -> list[Conversation]      the same ones for the same packages and seed

Their kinds are in `questions.toml`. They are filled from word lists (wonderwords), facts (randfacts), descriptions
of installed packages and docstrings of the standard library; the licences are in `SOURCES`. No question of a benchmark
is among them. Every second question is only begun, and the target completes it. Such questions resemble what the target
was trained on, and are more varied than those that it makes up alone.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

SOURCES = {
    "wonderwords": "word lists (MIT)",
    "randfacts": "facts (MIT)",
    "package descriptions": "of the installed packages (their own licences, all OSI-approved)",
    "docstrings": "of Python's standard library (PSF-2.0)",
}

WORD_LISTS = ("noun", "adjective", "verb")
"""Of wonderwords."""
MOST_BEGUN_WORDS = 6
"""The target completes a question after at most so many words."""
MOST_DRAWS = 20
"""Of a question that was asked before, because some kinds have few."""


class Conversation(NamedTuple):
    """The user's turns of a conversation; the model answers each.

    Example: Conversation(turns=("What is 3", "Are you sure? Explain why."), is_begun=True)
    """

    turns: tuple[str, ...]
    is_begun: bool
    """The model completes the first turn."""


class Function(NamedTuple):
    """A documented function of the standard library."""

    name: str
    doc: str
    code: str


class Material(NamedTuple):
    """The texts that fill the templates."""

    words: dict[str, list[str]]
    """Words of each sort; the templates' field `noun2` is another noun than `noun`."""
    functions: list[Function]


class Kinds(NamedTuple):
    """The templates of `questions.toml`."""

    first: dict[str, list[str]]
    """Templates of the first turn, by kind."""
    follow_up: list[str]
    words: dict[str, list[str]]


def make_questions(count: int, seed: int) -> list[Conversation]:
    """Draw conversations of every kind equally often, few complete questions twice. One in three has a second turn."""
    kinds, rng = read_kinds(), random.Random(seed)
    material, templates = read_material(kinds.words), list(kinds.first.values())
    conversations, seen = [], set()
    for number in range(count):
        is_begun = number % 2 == 1
        for _ in range(MOST_DRAWS):
            fields = _fields(material, rng)
            turns = [_fill(rng.choice(templates[number // 2 % len(templates)]), fields)]
            if is_begun or turns[0] not in seen:
                break
        if is_begun:
            turns = [" ".join(turns[0].split()[: rng.randint(0, MOST_BEGUN_WORDS)])]
        seen.add(turns[0])
        if rng.random() < 1 / 3:
            turns.append(_fill(rng.choice(kinds.follow_up), fields))
        conversations.append(Conversation(tuple(turns), is_begun))
    return conversations


def read_kinds() -> Kinds:
    """Read `questions.toml`."""
    read = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    templates = {kind["name"]: kind["templates"] for kind in read["kind"]}
    return Kinds(follow_up=templates.pop("follow-up"), first=templates, words=read["words"])


def read_material(words: dict[str, list[str]]) -> Material:
    """Read all sources, and add `words`. Raises ModuleNotFoundError without wonderwords and randfacts."""
    import randfacts
    import wonderwords

    lists = Path(wonderwords.__file__).parent / "assets"
    facts = (Path(randfacts.__file__).parent / "safe.txt").read_text(encoding="utf-8").splitlines()
    drawn = {kind: (lists / f"{kind}list.txt").read_text(encoding="utf-8").split() for kind in WORD_LISTS}
    drawn["fact"] = [fact.strip() for fact in facts if 30 < len(fact) < 300]
    return Material(words={**words, **drawn, "text": list(_paragraphs())}, functions=list(_functions()))


def _fill(template: str, fields: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: fields[match[1]], template)


def _fields(material: Material, rng: random.Random) -> dict[str, str]:
    a, b = rng.randint(21, 60), rng.randint(2, 20)
    numbers = {"a": a, "b": b, "c": a + rng.randint(1, 99), "a2": a + b, "a3": a + 2 * b, "b2": b + 5}
    function = rng.choice(material.functions)
    drawn = {}
    for sort, words in material.words.items():
        drawn[sort], drawn[f"{sort}2"], drawn[f"{sort}3"] = rng.sample(words, 3)
    return {
        **drawn,
        **{name: str(value) for name, value in numbers.items()},
        "small": str(rng.randint(2, 5)),
        "doc": function.doc,
        "code": function.code,
    }


def _paragraphs() -> list[str]:
    """Return prose from the descriptions of installed packages."""
    found: dict[str, None] = {}
    for package in sorted(distributions(), key=lambda package: package.name or ""):
        description = str(package.metadata.get_payload() or "")  # type: ignore[attr-defined]  # a message of email
        for paragraph in re.split(r"\n\s*\n", description):
            text = " ".join(paragraph.split())
            is_prose = text[:1].isalpha() and text.endswith(".") and not re.search(r"https?:|[|<>{}`]|::|\]\(", text)
            if is_prose and 200 < len(text) < 900:
                found[text] = None
    return list(found)


def _functions() -> list[Function]:
    """Return short documented functions of the standard library."""
    found: dict[str, Function] = {}
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        lines = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno]).lstrip()
            first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            if 30 < len(first) < 300 and len(code) < 900:
                found[node.name] = Function(node.name, first, code)
    return list(found.values())
