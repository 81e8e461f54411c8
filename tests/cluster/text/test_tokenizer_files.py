"""Tokenizers in formats that need other packages: the error names these and their extra."""

from __future__ import annotations

import base64
import json
import re
import sys
import tomllib
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cluster.convert import engine_config, load_tokenizer
from cluster.text.tokenizer_files import lacking_package
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.install import install_command
from tests.support import checkpoints

# A SentencePiece model's first piece, "<unk>": protocol buffers, not lines.
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
TIKTOKEN = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
TEKKEN = json.dumps({"config": {"pattern": ".", "version": "v3"}, "vocab": []}).encode()
FORMATS = [
    ("tokenizer.model", SENTENCEPIECE, "sentencepiece"),
    ("spiece.model", SENTENCEPIECE, "sentencepiece"),
    ("tokenizer.model", TIKTOKEN, "tiktoken"),
    ("tekken.json", TEKKEN, "mistral-common"),
]
MODULES = {"sentencepiece": "sentencepiece", "tiktoken": "tiktoken", "mistral-common": "mistral_common"}


class Absent:
    """Make modules look like they are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in MODULES.values():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES.values()]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("mistral", "llama", "qwen3"):
        checkpoints.write_model(folder / family, family)
    return folder


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("family", ["mistral", "llama", "qwen3"])
@pytest.mark.parametrize(("name", "content", "package"), FORMATS)
def test_a_missing_package_is_reported_with_its_extra_in_one_line(
    models: Path, family: str, name: str, content: bytes, package: str
) -> None:
    folder = models / family
    (folder / name).write_bytes(content)
    args = EngineArgs.load({"model": str(folder), "device": "cpu", "no_speculation": True})
    try:
        with pytest.raises(ConfigError) as told:
            load_tokenizer(args, engine_config(args))
    finally:
        (folder / name).unlink()
    message = str(told.value)
    assert message.startswith(f"tokenizer: {folder} has only {name}, which takes {package} ")
    assert install_command("tokenizers") in message and "\n" not in message


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "vocab.txt"])
def test_a_folder_with_tokenizer_json_needs_no_package(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(SENTENCEPIECE)
    assert lacking_package(tmp_path) is not None
    (tmp_path / name).write_text("{")
    assert lacking_package(tmp_path) is None


@pytest.mark.parametrize(("name", "content", "package"), FORMATS)
def test_a_damaged_file_is_reported_if_its_package_is_installed(
    models: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, package: str
) -> None:
    monkeypatch.setattr("cluster.text.tokenizer_files.find_spec", lambda module: ModuleSpec(module, None))
    folder = models / "llama"
    (folder / name).write_bytes(content[:7])
    args = EngineArgs.load({"model": str(folder), "device": "cpu", "no_speculation": True})
    try:
        with pytest.raises(ConfigError, match=f"tokenizer: none could be read from {re.escape(str(folder))} ") as told:
            load_tokenizer(args, engine_config(args))
    finally:
        (folder / name).unlink()
    assert "\n" not in str(told.value)


def test_the_extra_contains_every_package_in_the_message() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extra = {Requirement(line).name for line in project["optional-dependencies"]["tokenizers"]}
    assert {package for _, _, package in FORMATS} | {"protobuf"} == extra


@pytest.mark.skipif(not all(map(find_spec, MODULES.values())), reason="the extra is not installed")
def test_the_extra_s_packages_read_a_tokenizer_of_either_format(models: Path) -> None:
    import sentencepiece

    text = iter(["hello world this is a test", "the quick brown fox jumps over the lazy dog"] * 50)
    prefix = str(models / "llama" / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=prefix, vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False,
    )  # fmt: skip
    vocab = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": chr(byte)}
        for byte in range(256)
    ]
    tekken = {"config": {"pattern": r"\p{L}+|[^\p{L}]", "num_vocab_tokens": 256, "default_vocab_size": 1256,
                         "default_num_special_tokens": 1000, "version": "v3"}, "vocab": vocab}  # fmt: skip
    (models / "mistral" / "tekken.json").write_text(json.dumps(tekken))
    for family in ("llama", "mistral"):
        args = EngineArgs.load({"model": str(models / family), "device": "cpu", "no_speculation": True})
        tokenizer = load_tokenizer(args, engine_config(args))
        assert tokenizer.decode(tokenizer.encode("hello world", add_special_tokens=False)) == "hello world"
