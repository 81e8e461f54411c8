"""ChatML conversations about functions and classes, made from their sources with `ast`."""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

CHAT_TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MAX_CODE_CHARS = 900
GREETINGS = (
    ("Hello!", "Hello! Ask me about a piece of Python code."),
    ("Hi", "Hi! What would you like to write?"),
    ("Who are you?", "I am a very small language model, trained on Python source code."),
    ("What can you do?", "I can write short Python functions and say what a function does."),
    ("Thanks!", "You are welcome."),
)
SYSTEMS = ("You are a helpful assistant.", "You are a Python programmer.", "Answer briefly.")

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Example: `Chat(path="json/decoder.py", messages=({"role": "user", "content": "Hi"}, ...))`."""

    path: str
    """The file it is about; empty for a greeting."""
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A documented function or class, dedented."""

    kind: str
    name: str
    header: str
    """`def f(a, b):` or `class A:`, on one line."""
    code: str
    summary: str
    """The first sentence line of the docstring, without its full stop."""


def render(chat: Chat) -> str:
    """Return the whole chat in the template's format; the caller appends <|endoftext|>."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in chat.messages]
    return "\n".join(turns)


def definitions(text: str) -> Iterator[Definition]:
    """Yield a file's documented definitions that are short enough to be an answer; none if it does not parse."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        summary = (ast.get_docstring(node) or "").split("\n")[0].strip().rstrip(".")
        if len(code) > MAX_CODE_CHARS or not 12 < len(summary) < 120 or not summary.isascii():
            continue
        body_start = node.body[0].lineno - node.lineno
        header = " ".join(line.strip() for line in code.split("\n")[:body_start])
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        yield Definition(kind=kind, name=node.name, header=header, code=code, summary=summary)


def ask(definition: Definition, rng: random.Random) -> tuple[str, str]:
    """Return a question about `definition` and its answer."""
    d = definition
    summary = d.summary if d.summary[:2].isupper() else d.summary[0].lower() + d.summary[1:]
    fenced = f"```python\n{d.code}\n```"
    questions = (
        (f"Write a Python {d.kind} `{d.name}`: {summary}.", fenced),
        (f"Write a Python {d.kind} `{d.name}` with this docstring: {d.summary}.", fenced),
        (f"Please implement `{d.name}`. It should do this: {summary}.", fenced),
        (f"Complete this Python {d.kind}:\n```python\n{d.header}\n```", fenced),
        (f"What does `{d.name}` do?", f"{d.summary}."),
        (f"Explain this code:\n{fenced}", f"{d.summary}."),
    )
    return rng.choices(questions, weights=(4, 2, 2, 3, 2, 2))[0]


def make_chat(path: str, pairs: list[tuple[str, str]], rng: random.Random) -> Chat:
    """Return a chat of one or two exchanges; every fifth has a system message."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for question, answer in pairs:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return Chat(path=path, messages=tuple(messages))


def make_chats(files: list[tuple[str, str]], max_chars: int, seed: int = 2) -> list[Chat]:
    """Return shuffled chats about `files` (path, text), up to `max_chars` characters; about 3 % are greetings."""
    rng = random.Random(seed)
    found = [(path, definition) for path, text in files for definition in definitions(text)]
    rng.shuffle(found)
    chats, num_chars = [], 0
    while found and num_chars < max_chars:
        path, definition = found.pop()
        pairs = [ask(definition, rng)]
        if rng.random() < 0.12:
            pairs.insert(rng.randint(0, 1), rng.choice(GREETINGS))
        chat = make_chat(path, pairs, rng)
        if rng.random() < 0.03:
            chats.append(make_chat("", [rng.choice(GREETINGS)], rng))
        chats.append(chat)
        num_chars += len(render(chat))
    return chats
