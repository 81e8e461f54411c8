"""Batches of answered conversations, with what the target computes for them and a head reads or learns.

    read_rows(lines, padding) -> Rows
    batches(begins, chosen, num_rows, rng)               batches of row numbers, without end
    read_target(target, rows, chosen, draft_ids) -> Batch
    KeptReadings(target, rows, draft_ids)(chosen) -> Batch      the same, which runs the target over a row only once

Legend: R rows, B rows of a batch, N tokens of a row, A answer tokens of a batch, D draft vocabulary, F width of all
features together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

ROW_LENGTH = 448


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the decoder layers whose input is a feature, i.e. Hugging Face's `hidden_states[layer]`."""
    return 2, num_layers // 2, num_layers - 3


class Rows(NamedTuple):
    """Holds R conversations, each ending in an answer, cut or padded to N tokens, on the CPU."""

    tokens_RN: Tensor  # int32
    begins_R: Tensor  # the answer's first position
    ends_R: Tensor  # the position behind its last


class Batch(NamedTuple):
    """Holds what the head reads of B rows with N tokens, and learns where one of A tokens of answers comes next.

    What selects is on the CPU, so that the host need not wait for the device.
    """

    tokens_BN: Tensor  # int32, on the CPU
    embeds_BNH: Tensor
    features_BNF: Tensor
    is_answer_BN: Tensor  # bool, on the CPU: the next token is one of the answer
    index_BN: Tensor  # on the CPU: the position's index among the A
    favourite_A: Tensor  # the target's most likely next token
    law_AD: Tensor  # the target's probabilities of the draft vocabulary, of a sum of at most 1


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to the device without waiting for what the device does."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def read_rows(lines: list[dict], padding: int) -> Rows:
    """Read the answers that fit, see `training.answers.read_lines`."""
    lines = [line for line in lines if len(line["prompt"]) < ROW_LENGTH - 32 and line["answer"]]
    lines.sort(key=lambda line: random.Random(str(line["id"])).random())  # turns of one conversation stay together
    tokens = np.full((len(lines), ROW_LENGTH), padding, np.int32)
    begins, ends = (np.empty(len(lines), np.int64) for _ in range(2))
    for row, line in enumerate(lines):
        own = (line["prompt"] + line["answer"])[:ROW_LENGTH]
        tokens[row, : len(own)], begins[row], ends[row] = own, len(line["prompt"]), len(own)
    return Rows(*(torch.from_numpy(array) for array in (tokens, begins, ends)))


def batches(begins: list[int], chosen: list[int], num_rows: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield shuffled batches of rows without end, each of rows whose answers begin at about the same position."""
    while True:
        rng.shuffle(chosen)
        for start in range(0, len(chosen), 8 * num_rows):
            part = sorted(chosen[start : start + 8 * num_rows], key=begins.__getitem__)
            some = [part[first : first + num_rows] for first in range(0, len(part) - num_rows + 1, num_rows)]
            rng.shuffle(some)
            yield from some


@torch.no_grad()
def read_target(target: LlamaForCausalLM, rows: Rows, chosen: list[int], draft_ids: Tensor) -> Batch:
    """Run the target over some rows, cut to the longest of them."""
    own, device = torch.tensor(chosen), draft_ids.device
    begins, ends = rows.begins_R[own, None], rows.ends_R[own, None]
    length = int(ends.max())
    following = torch.arange(1, length + 1)
    is_answer = (following >= begins) & (following < ends)
    tokens = send(rows.tokens_RN[own, :length].long(), device)
    output = target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    logits = target.lm_head(output.last_hidden_state.flatten(0, 1)[send(is_answer.flatten().nonzero()[:, 0], device)])
    normaliser_A1 = torch.cat([part.float().logsumexp(-1, keepdim=True) for part in logits.split(1024)])
    return Batch(
        tokens_BN=rows.tokens_RN[own, :length],
        embeds_BNH=target.model.embed_tokens(tokens).float(),
        features_BNF=torch.cat([output.hidden_states[n] for n in feature_layers(len(target.model.layers))], -1).float(),
        is_answer_BN=is_answer,
        index_BN=(is_answer.flatten().cumsum(0) - 1).view_as(is_answer),
        favourite_A=logits.argmax(-1),
        law_AD=(logits[:, draft_ids].float() - normaliser_A1).exp(),
    )


class KeptReadings:
    """`read_target` with a memory: of each row, 3.5 KB a token and 10 KB an answer token of a head for SmolLM2.

    A training sees each row several times, and on a CPU the target takes most of its time. A row is run alone, so that
    what is read of it does not depend on the rows beside it.
    """

    def __init__(self, target: LlamaForCausalLM, rows: Rows, draft_ids: Tensor) -> None:
        self._target, self._rows, self._draft_ids = target, rows, draft_ids
        self._kept: dict[int, Batch] = {}

    def __call__(self, chosen: list[int]) -> Batch:
        """Return the batch of these rows."""
        parts = [self._kept.get(row) or self._read(row) for row in chosen]
        length = max(part.tokens_BN.shape[1] for part in parts)

        def padded(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat([F.pad(x, [0] * (2 * x.ndim - 4) + [0, length - x.shape[1]]) for x in tensors])

        tokens_BN = self._rows.tokens_RN[torch.tensor(chosen), :length]
        is_answer_BN = padded(part.is_answer_BN for part in parts)
        return Batch(
            tokens_BN=tokens_BN,
            embeds_BNH=self._target.model.embed_tokens(tokens_BN.long()).float(),
            features_BNF=padded(part.features_BNF for part in parts).float(),
            is_answer_BN=is_answer_BN,
            index_BN=(is_answer_BN.flatten().cumsum(0) - 1).view_as(is_answer_BN),
            favourite_A=torch.cat([part.favourite_A for part in parts]),
            law_AD=torch.cat([part.law_AD for part in parts]).float(),
        )

    def _read(self, row: int) -> Batch:
        read = read_target(self._target, self._rows, [row], self._draft_ids)
        none = read.embeds_BNH[:0]  # looked up anew
        kept = read._replace(embeds_BNH=none, features_BNF=read.features_BNF.bfloat16(), law_AD=read.law_AD.bfloat16())
        self._kept[row] = kept
        return kept
