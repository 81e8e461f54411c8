"""Python sources -> tokenizer, token arrays, chats and the held-out prompts.

The walk: `find_files` -> split by hash of path -> `train_tokenizer` -> `encode_documents` (code) and `chat.make_chats`
-> `.data/{train,val,chat,chat_val}.npy` (uint16, every document followed by <|endoftext|>) and `corpus.json`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import CHAT_TEMPLATE, Chat, make_chats, render

logger = logging.getLogger(__name__)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_OF_TEXT = 0
VOCAB_SIZE = 2048
HELD_OUT_EVERY = 80
"""One file in this many is held out, by hash of its path."""
MAX_FILE_BYTES = 150_000
CHAT_CHARS = 5_500_000
PRE_TOKENS = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\n+|[ \t]+|\s"
"""A newline run and the indentation after it are separate tokens, so that a prompt may end in either."""

SKIPPED_PARTS = (
    "/test/", "/tests/", "/testing/_internal/", "/idlelib/", "/lib2to3/tests", "/encodings/cp", "/encodings/mac_",
    "/encodings/iso", "/encodings/kz", "/encodings/koi", "unicodedata", "/pydoc_data/", "/ensurepip/_bundled",
    "/site-packages/", "/_vendor/", "/vendored/", "/thirdparty", "/generated/", "/artifacts/", "/_antlr/", "_pb2",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A package whose .py files are read; `max_bytes` keeps a large one from dominating."""

    folder: str
    licence: str
    holder: str
    max_bytes: int = 4_000_000
    skip: str = "\0"
    """A path fragment that another source reads."""


SOURCES = (
    SourceFile(
        folder="", licence="PSF-2.0", holder="Python Software Foundation (Python 3.11 stdlib)", max_bytes=20_000_000
    ),
    SourceFile(folder="torch", licence="BSD-3-Clause", holder="PyTorch contributors", max_bytes=8_000_000),
    SourceFile(folder="numpy", licence="BSD-3-Clause", holder="NumPy developers"),
    SourceFile(
        folder="transformers", licence="Apache-2.0", holder="The Hugging Face team", skip="/transformers/models/"
    ),
    SourceFile(folder="transformers/models", licence="Apache-2.0", holder="The Hugging Face team", max_bytes=1_500_000),
    SourceFile(folder="ray", licence="Apache-2.0", holder="The Ray authors", max_bytes=6_000_000),
    SourceFile(folder="sympy", licence="BSD-3-Clause", holder="SymPy development team", max_bytes=2_500_000),
    SourceFile(folder="networkx", licence="BSD-3-Clause", holder="NetworkX developers", max_bytes=2_500_000),
    SourceFile(folder="huggingface_hub", licence="Apache-2.0", holder="The Hugging Face team", max_bytes=2_500_000),
    SourceFile(folder="pydantic", licence="MIT", holder="Samuel Colvin and other contributors"),
    SourceFile(folder="fastapi", licence="MIT", holder="Sebastian Ramirez"),
    SourceFile(folder="typer", licence="MIT", holder="Sebastian Ramirez"),
    SourceFile(folder="starlette", licence="BSD-3-Clause", holder="Encode OSS"),
    SourceFile(folder="uvicorn", licence="BSD-3-Clause", holder="Encode OSS"),
    SourceFile(folder="aiohttp", licence="Apache-2.0", holder="aiohttp contributors"),
    SourceFile(folder="anyio", licence="MIT", holder="Alex Gronholm"),
    SourceFile(folder="openai", licence="Apache-2.0", holder="OpenAI", max_bytes=800_000),
    SourceFile(folder="jinja2", licence="BSD-3-Clause", holder="Pallets"),
    SourceFile(folder="click", licence="BSD-3-Clause", holder="Pallets"),
    SourceFile(folder="rich", licence="MIT", holder="Will McGugan"),
    SourceFile(folder="requests", licence="Apache-2.0", holder="Kenneth Reitz"),
    SourceFile(folder="urllib3", licence="MIT", holder="urllib3 contributors"),
    SourceFile(folder="websockets", licence="BSD-3-Clause", holder="Aymeric Augustin and contributors"),
    SourceFile(folder="fsspec", licence="BSD-3-Clause", holder="Martin Durant"),
    SourceFile(folder="_pytest", licence="MIT", holder="Holger Krekel and others"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One source file. Example: `Document(path="numpy/lib/scimath.py", licence="BSD-3-Clause", text="...")`."""

    path: str
    licence: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Return whether the file is kept for evaluation."""
        return path_hash(self.path) % HELD_OUT_EVERY == 0


def path_hash(path: str) -> int:
    """Return a stable hash of a path."""
    return int(hashlib.md5(path.encode()).hexdigest(), 16)


def strip_licence_header(text: str) -> str:
    """Drop a leading comment block with a copyright notice, which the models would memorize."""
    lines = text.split("\n")
    num_header = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    is_licence = "opyright" in "\n".join(lines[:num_header])
    return "\n".join(lines[num_header:]) if is_licence else text


def read_source(source: SourceFile, seen: set[int]) -> list[Document]:
    """Return files of one source, in hash order, up to `max_bytes`; add the hashes of their texts to `seen`."""
    paths = sysconfig.get_paths()
    root = Path(paths["purelib"] if source.folder else paths["stdlib"])
    documents, num_bytes = [], 0
    files = [(file, file.relative_to(root).as_posix()) for file in (root / source.folder).rglob("*.py")]
    files = [(f, name) for f, name in files if not any(s in f"/{name}" for s in (*SKIPPED_PARTS, source.skip))]
    for file, name in sorted(files, key=lambda pair: path_hash(pair[1])):
        text = strip_licence_header(file.read_text(encoding="utf-8", errors="replace")).strip() + "\n"
        is_wrong_size = not 200 < len(text) < MAX_FILE_BYTES or num_bytes + len(text) > source.max_bytes
        if is_wrong_size or len(text) > 90 * text.count("\n") or hash(text) in seen:
            continue
        seen.add(hash(text))
        num_bytes += len(text)
        documents.append(
            Document(path=name if source.folder else f"python3.11/{name}", licence=source.licence, text=text)
        )
    return documents


def read_sources() -> list[Document]:
    """Return the documents of `SOURCES` without duplicates, shuffled with a fixed seed."""
    seen: set[int] = set()
    documents = [document for source in SOURCES for document in read_source(source, seen)]
    random.Random(0).shuffle(documents)
    return documents


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens, `SPECIALS` first."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIALS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the three files `AutoTokenizer` reads, by hand so that they do not depend on the library's version."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[3],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Concatenate the token ids of `texts`, each followed by <|endoftext|>, as uint16 [num_tokens]."""
    ids: list[np.ndarray] = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            ids.append(np.array([*encoding.ids, END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(ids)


def cut_prompt(tokenizer: Tokenizer, text: str, rng: random.Random, is_at_line_end: bool) -> str | None:
    """Return 20 to 120 tokens of `text` from the start of a line; None if the cut is not suitable."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "    def ", "import ", "@"))]
    start = rng.choice(starts or [0])
    ids = tokenizer.encode("\n".join(lines[start:])).ids[: rng.randint(24, 118)]
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    prompt = prompt[: prompt.rfind("\n") + 1] if is_at_line_end else prompt.rstrip()
    is_good = prompt.isascii() and 20 <= len(tokenizer.encode(prompt).ids) <= 120
    return prompt if is_good else None


def code_prompts(tokenizer: Tokenizer, held_out: list[Document], training_text: str, count: int) -> list[dict]:
    """Return `count` code prefixes from held-out files, alternately cut at a line end and within a line."""
    rng, round_robin = random.Random(1), 0
    rows: list[dict] = []
    while len(rows) < count:
        document = held_out[round_robin % len(held_out)]
        round_robin += 1
        prompt = cut_prompt(tokenizer, document.text, rng, is_at_line_end=len(rows) % 2 == 0)
        if prompt and prompt not in training_text:
            source = f"{document.path} ({document.licence})"
            rows.append({"id": f"code-{len(rows):02d}", "text": prompt, "source": source})
    return rows


def chat_prompts(chats: list[Chat], licences: dict[str, str], training_text: str, count: int) -> list[dict]:
    """Return `count` questions about held-out functions of different files. licences: path -> licence."""
    rows: list[dict] = []
    seen: set[str] = set()
    for chat in chats:
        question = next((m["content"] for m in chat.messages if m["role"] == "user"), "")
        if chat.path and chat.path not in seen and question not in training_text and len(question) < 400:
            seen.add(chat.path)
            source = f"{chat.path} ({licences[chat.path]})"
            messages = [m for m in chat.messages[:2] if m["role"] != "assistant"]
            rows.append({"id": f"chat-{len(rows):02d}", "messages": messages, "source": source})
        if len(rows) == count:
            return rows
    raise ValueError(f"only {len(rows)} of {count} chat prompts found: hold out more files")


def write_jsonl(rows: list[dict], file: Path) -> None:
    """Write rows as JSON Lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_corpus(folder: Path, prompts_file: Path) -> dict:
    """Read, tokenise and write everything; return the statistics, which are also written to `corpus.json`."""
    documents = read_sources()
    training = [d for d in documents if not d.is_held_out]
    held_out = [d for d in documents if d.is_held_out]
    chats = make_chats([(d.path, d.text) for d in training], max_chars=CHAT_CHARS)
    held_out_chats = make_chats([(d.path, d.text) for d in held_out], max_chars=CHAT_CHARS)
    logger.info("read %d files, %d held out, %d chats", len(documents), len(held_out), len(chats))

    tokenizer = train_tokenizer([d.text for d in training[::3]])
    save_tokenizer(tokenizer, folder / "tokenizer")
    splits = {
        "train": [d.text for d in training],
        "val": [d.text for d in held_out],
        "chat": [render(chat) for chat in chats],
        "chat_val": [render(chat) for chat in held_out_chats],
    }
    num_tokens = {}
    for name, texts in splits.items():
        tokens = encode_documents(tokenizer, texts)
        np.save(folder / f"{name}.npy", tokens)
        num_tokens[name] = len(tokens)
        logger.info("%s: %d tokens", name, len(tokens))

    training_text = "\n".join(splits["train"] + splits["chat"])
    licences = {d.path: d.licence for d in held_out}
    rows = code_prompts(tokenizer, held_out, training_text, 38)
    rows += chat_prompts(held_out_chats, licences, training_text, 12)
    write_jsonl(rows, prompts_file)
    sizes = {source.folder or "python3.11": 0 for source in SOURCES}
    for document in documents:
        top = next(f for f in sorted(sizes, key=len, reverse=True) if document.path.startswith(f"{f}/"))
        sizes[top] += len(document.text)
    statistics = {
        "num_files": len(documents),
        "num_held_out_files": len(held_out),
        "num_chats": len(chats),
        "num_tokens": num_tokens,
        "chars_per_token": round(sum(map(len, splits["train"])) / num_tokens["train"], 3),
        "sources": [asdict(s) | {"num_chars": sizes[s.folder or "python3.11"]} for s in SOURCES],
    }
    (folder / "corpus.json").write_text(json.dumps(statistics, indent=2) + "\n")
    return statistics
