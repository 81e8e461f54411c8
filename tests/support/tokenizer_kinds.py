"""Small tokenizers of common kinds, with tokens that are not whole characters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.text.tokenizer import Tokenizer

Kind = Callable[[], tokenizers.Tokenizer]

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>"]
WORDS = ["▁", "▁▁", "a", "▁a", "b", "\ufffd", "▁\ufffd", "é", "<0x", "ab"]


def llama() -> tokenizers.Tokenizer:
    """Return a SentencePiece tokenizer with byte fallback, as in Llama 2 and Mistral."""
    vocab = {word: id for id, word in enumerate([*SPECIAL, *BYTES, *WORDS])}
    fast = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast


def gemma() -> tokenizers.Tokenizer:
    """Return a SentencePiece tokenizer that adds no space before a text."""
    fast = llama()
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def byte_level() -> tokenizers.Tokenizer:
    """Return a byte-level BPE as in GPT-2, with tokens of several bytes that are not whole characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = {char: "".join(letters_of(char)) for char in ("世", "🌳")}
    words = [*SPECIAL, *letters, spell["世"][:2], spell["世"][1:], spell["🌳"][:3], "a" + spell["🌳"][:2], "Ġa"]
    fast = tokenizers.Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, [], unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def letters_of(text: str) -> list[str]:
    [(spelt, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(spelt)


def word_piece() -> tokenizers.Tokenizer:
    words = [*SPECIAL, "a", "##a", "b", "##b", ".", ",", "don", "'", "t", "世", "##世", "\ufffd"]
    vocab = {word: id for id, word in enumerate(words)}
    fast = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece()
    return fast


def metaspace() -> tokenizers.Tokenizer:
    """Return a Unigram tokenizer as in T5."""
    fast = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in [*SPECIAL, *WORDS]], unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    return fast


def word_ends() -> tokenizers.Tokenizer:
    """Return a BPE as in GPT-1: a space follows a word only if another word follows."""
    vocab = {word: id for id, word in enumerate([*SPECIAL, "a", "a</w>", "b", "b</w>", "世</w>"])}
    fast = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.decoder = decoders.BPEDecoder()
    return fast


def rewriting() -> tokenizers.Tokenizer:
    """Return a tokenizer whose decoder removes a space when the next token arrives, so streams and full text differ."""
    fast = llama()
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(" a", "a")]
    )
    return fast


def load(kind: Kind, folder: Path) -> Tokenizer:
    """Write a tokenizer of this kind to the folder and load it."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=kind(), unk_token="<unk>", bos_token="<s>")
    wrapped.save_pretrained(folder)
    return Tokenizer(str(folder))
