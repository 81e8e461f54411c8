"""Questions for a chat model, made from freely licensed texts that Python packages carry.

make_questions(count, seed) -> list[Conversation]      the same ones for the same packages and seed

Topics come from word lists (wonderwords), facts (randfacts), descriptions of installed packages, and docstrings of the
standard library; each source's licence is in `SOURCES`. No question of a benchmark is among them.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

SOURCES = {
    "wonderwords": "word lists (MIT)",
    "randfacts": "facts (MIT)",
    "package descriptions": "of the installed packages (their own licences, all OSI-approved)",
    "docstrings": "of Python's standard library (PSF-2.0)",
}

WRITING = (
    "Write a short story about {adjective} {noun} and a {noun2}.",
    "Write an email to a colleague about the {noun}, and keep it polite and short.",
    "Write a poem about a {adjective} {noun}.",
    "Describe a {adjective} {noun} in one paragraph, so that a child understands it.",
    "Write a blog post about how to {verb} with a {noun}. Give it a title and three sections.",
    "Write a product description of a {adjective} {noun}.",
    "Draft an announcement: the {noun} opens next week. Mention the {noun2}.",
    "Write the opening of a novel in which a {noun} changes everything.",
)
ROLES = (
    "Imagine that you are a {noun}. Describe your day.",
    "Act as a teacher and explain to me what a {noun} is, and how it differs from a {noun2}.",
    "You are an interviewer. Ask me five questions about my work with a {noun}.",
    "Pretend to be a {adjective} shopkeeper who sells a {noun}. How do you answer when I ask for the price?",
    "Take the role of a doctor. A patient says that they {verb} every night. What do you ask?",
)
REASONING = (
    "{name} has {a} {noun}s and gives {b} of them to {name2}. How many are left? Explain step by step.",
    "A {noun} costs {a} dollars and a {noun2} costs {b} dollars. What do three of each cost together?",
    "{name} is taller than {name2}, and {name2} is taller than {name3}. Who is the shortest, and why?",
    "A train travels {a} kilometres in {b} hours. What is its average speed?",
    "What is {a} times {b}? Show your work.",
    "If x + {a} = {c}, what is x? Explain each step.",
    "A rectangle is {a} metres long and {b} metres wide. What are its area and its perimeter?",
    "What comes next: {a}, {a2}, {a3}, ...? Explain the rule.",
    "Which weighs more, a {noun} or a {noun2}? Give your reasons.",
)
KNOWLEDGE = (
    "Is this true: {fact} Explain in a few sentences.",
    "{fact} Why is that?",
    "Tell me more about this: {fact}",
    "Rewrite this sentence in three different ways: {fact}",
    "What does the word '{noun}' mean? Use it in two sentences.",
    "List five things that you can do with a {noun}.",
    "What are the advantages and disadvantages of a {adjective} {noun}?",
    "Compare a {noun} with a {noun2} in a table.",
    "Explain the importance of the {noun} in human history.",
    "How does one {verb}? Give me simple instructions in steps.",
)
READING = (
    "Summarise this text in two sentences:\n\n{text}",
    "Read this text and list its three most important points:\n\n{text}",
    "What is this about?\n\n{text}",
    "Extract all names that appear in this text, as a JSON list:\n\n{text}",
    "Rewrite this for beginners:\n\n{text}",
)
CODING = (
    "Write a Python function that does this: {doc}",
    "Write a Python function `{function}`. Its docstring says: {doc}",
    "Explain what this Python function does:\n\n```python\n{code}\n```",
    "Write a program in {language} that reads a list of {noun}s from a file and sorts them.",
    "Write a {language} function that counts how often the word '{noun}' occurs in a text.",
    "How do I reverse a list in {language}? Show an example.",
    "Write an HTML page about a {noun} with a heading, a paragraph and a list.",
)
FOLLOW_UPS = (
    "Make it shorter.",
    "Now explain it to a five-year-old.",
    "Can you give an example?",
    "Rewrite your answer as a list.",
    "Are you sure? Explain why.",
    "Now write it in a formal tone.",
    "What would be different without the {noun}?",
    "Thanks. What else should I know?",
)
TEMPLATES = (WRITING, ROLES, REASONING, KNOWLEDGE, READING, CODING)
LANGUAGES = ("Python", "C++", "Java", "JavaScript", "Rust", "Go", "C")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mei")


class Conversation(NamedTuple):
    """The user's turns of a conversation; the model answers each.

    Example: Conversation(turns=("What is 3 times 4?", "Are you sure? Explain why."))
    """

    turns: tuple[str, ...]


class Function(NamedTuple):
    """A documented function of the standard library."""

    name: str
    doc: str
    code: str


class Material(NamedTuple):
    """The texts that fill the templates."""

    nouns: list[str]
    adjectives: list[str]
    verbs: list[str]
    facts: list[str]
    texts: list[str]
    functions: list[Function]


def make_questions(count: int, seed: int) -> list[Conversation]:
    """Draw conversations: every kind of question equally often, every third with a second turn."""
    material, rng = read_material(), random.Random(seed)
    conversations = []
    for number in range(count):
        fields = _fields(material, rng)
        turns = [_fill(rng.choice(TEMPLATES[number % len(TEMPLATES)]), fields)]
        if rng.random() < 1 / 3:
            turns.append(_fill(rng.choice(FOLLOW_UPS), fields))
        conversations.append(Conversation(tuple(turns)))
    return conversations


def read_material() -> Material:
    """Read all sources. Raises ModuleNotFoundError without wonderwords and randfacts."""
    import randfacts
    import wonderwords

    words = Path(wonderwords.__file__).parent / "assets"
    facts = (Path(randfacts.__file__).parent / "safe.txt").read_text(encoding="utf-8").splitlines()
    return Material(
        *((words / f"{kind}list.txt").read_text(encoding="utf-8").split() for kind in ("noun", "adjective", "verb")),
        facts=[fact.strip() for fact in facts if 30 < len(fact) < 300],
        texts=list(_paragraphs()),
        functions=list(_functions()),
    )


def _fill(template: str, fields: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: fields[match[1]], template)


def _fields(material: Material, rng: random.Random) -> dict[str, str]:
    a, b = rng.randint(2, 60), rng.randint(2, 20)
    function = rng.choice(material.functions)
    draw: Callable[[list[str]], str] = rng.choice
    name, name2, name3 = rng.sample(NAMES, 3)
    return {
        "noun": draw(material.nouns),
        "noun2": draw(material.nouns),
        "adjective": draw(material.adjectives),
        "verb": draw(material.verbs),
        "fact": draw(material.facts),
        "text": draw(material.texts),
        "function": function.name,
        "doc": function.doc,
        "code": function.code,
        "language": rng.choice(LANGUAGES),
        "name": name,
        "name2": name2,
        "name3": name3,
        "a": str(max(a, b)),
        "b": str(min(a, b)),
        "c": str(max(a, b) + rng.randint(1, 99)),
        "a2": str(max(a, b) + b),
        "a3": str(max(a, b) + 2 * b),
    }


def _paragraphs() -> list[str]:
    """Return prose from the descriptions of installed packages."""
    found: dict[str, None] = {}
    for package in sorted(distributions(), key=lambda package: package.name or ""):
        description = str(package.metadata.get_payload() or "")
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
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            doc, code = ast.get_docstring(node) or "", ast.get_source_segment(text, node) or ""
            first = doc.split("\n\n")[0].replace("\n", " ")
            if 30 < len(first) < 300 and len(code) < 900:
                found[node.name] = Function(node.name, first, code)
    return list(found.values())
