"""Token arrays on the device, and random windows of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

END_OF_TEXT = 0
CHAT_SHARE = 0.125
SNAP_SHARE = 0.25
"""Share of the windows that begin at the start of a document."""


class TokenStream:
    """One concatenated array of documents and a generator of windows from it."""

    def __init__(self, tokens: Tensor, seed: int):
        self.tokens = tokens
        self.first_tokens = torch.nonzero(tokens[:-1] == END_OF_TEXT).flatten() + 1
        self.generator = torch.Generator(tokens.device).manual_seed(seed)

    def windows(self, num_windows: int, length: int) -> Tensor:
        """Return random windows [num_windows, length] int64; `SNAP_SHARE` of them begin at a document."""
        device, generator = self.tokens.device, self.generator
        last = len(self.tokens) - length
        anywhere = torch.randint(0, last, (num_windows,), generator=generator, device=device)
        documents = torch.randint(0, len(self.first_tokens), (num_windows,), generator=generator, device=device)
        snapped = torch.rand(num_windows, generator=generator, device=device) < SNAP_SHARE
        starts = torch.where(snapped, self.first_tokens[documents].clamp(max=last), anywhere)
        offsets = torch.arange(length, device=device)
        return self.tokens[starts[:, None] + offsets].long()


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The training mixture, code with a fixed share of chats."""

    code: TokenStream
    chat: TokenStream

    def batch(self, num_rows: int, length: int) -> Tensor:
        """Return [num_rows, length] int64, of which about `CHAT_SHARE` are windows of chats."""
        num_chats = max(1, round(num_rows * CHAT_SHARE))
        rows = (self.code.windows(num_rows - num_chats, length), self.chat.windows(num_chats, length))
        return torch.cat(rows)


def load_tokens(file: Path, device: torch.device) -> Tensor:
    """Load a uint16 array from a file as an int32 tensor [num_tokens]."""
    return torch.from_numpy(np.load(file).astype(np.int32)).to(device)


def load_corpus(folder: Path, device: torch.device, is_held_out: bool = False, seed: int = 0) -> Corpus:
    """Load the training or the held-out corpus onto a device."""
    code, chat = ("val.npy", "chat_val.npy") if is_held_out else ("train.npy", "chat.npy")
    return Corpus(
        code=TokenStream(load_tokens(folder / code, device), seed),
        chat=TokenStream(load_tokens(folder / chat, device), seed + 1),
    )
