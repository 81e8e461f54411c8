"""Checks that the packages which transformers needs to convert a tokenizer's files are installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from secateur.install import install_command

_READ_AS_THEY_ARE = ("tokenizer.json", "vocab.json", "vocab.txt")

# Module -> the package that contains it.
_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
_TIKTOKEN = {"tiktoken": "tiktoken"}
_TEKKEN = {"mistral_common": "mistral-common"}


def lacking_package(folder: Path) -> str | None:
    """Return a message that says what to install to read a folder's tokenizer; None if nothing is missing."""
    for name, needed in _needs(folder).items():
        if missing := [package for module, package in needed.items() if not _is_installed(module)]:
            return (
                f"{folder} has only {name}, which takes {' and '.join(missing)} to read: "
                f"{install_command('tokenizers')}, or name a folder that has a tokenizer.json"
            )
    return None


def _needs(folder: Path) -> dict[str, dict[str, str]]:
    """Return the packages that each tokenizer file needs; {} if the folder has a file that needs none."""
    if any((folder / name).exists() for name in _READ_AS_THEY_ARE):
        return {}
    if (folder / "tekken.json").exists():
        return {"tekken.json": _TEKKEN}
    return {file.name: _TIKTOKEN if _is_tiktoken(file) else _SENTENCEPIECE for file in sorted(folder.glob("*.model*"))}


def _is_tiktoken(file: Path) -> bool:
    """Return whether a file is tiktoken's (each line a base64 token and its rank) rather than SentencePiece's."""
    with file.open("rb") as opened:
        first = opened.readline(4096).split()
    return len(first) == 2 and first[1].isdigit()


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
