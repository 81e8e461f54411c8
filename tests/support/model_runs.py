"""Models without an engine: sequences in their pools, with trees, prompt chunks and accepted paths; and transformers'.

Oracle(path).logits(tokens) -> [N, V]                 Run(model, num).forward(trees, tokens), .accept(paths, tokens)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.attention_cases import paths_of
from workers.kernels.select import TORCH
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.types import AttentionMetadata, Folds

PAGE, SEATS, KEPT = 16, 4, [5, 6, 7]
"""Sequences have seats from SEATS on downwards; states are kept in seats KEPT."""
Keeps = Sequence[tuple[int, int]]
"""Rows, and the seats for the states behind them."""


class Oracle:
    """Transformers' logits after the tokens of a sequence."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        return self._model(torch.tensor([tokens])).logits[0]


class Run:
    """Sequences in a model's pools, each on its own seat and pages, with the state of an engine."""

    def __init__(self, model: BaseDecoder, num: int = 1, num_pages: int = 16) -> None:
        self.model, self.num_pages = model, num_pages
        num_slots = (num * self.num_pages + 1) * PAGE
        self.kv: KVPool = model.new_kv_pool(num_slots, num_seats=max(KEPT), num_tree_rows=64 * num)
        self.texts: list[list[int]] = [[] for _ in range(num)]
        self._folds: Folds | None = None

    def forward(self, trees: list[list[int]], tokens: list[list[int]], keeps: Keeps = ()) -> list[Tensor]:
        """Run a step: trees (parents) of the first requests, then chunks (parents []) of others; return the logits."""
        offsets, rows, masks, base, read, write = [0], [], [], [], [], []
        for request, (parents, own) in enumerate(zip(trees, tokens, strict=True)):
            done, seat = len(self.texts[request]), SEATS - request
            depth = [len(path) - 1 for path in paths_of(parents)] or range(len(own))
            rows += [
                (token, done + depth[i], done + i, done if parents else done + i + 1) for i, token in enumerate(own)
            ]
            masks += [sum(1 << bit for bit in path) for path in paths_of(parents)] or [0] * len(own)
            offsets.append(len(rows))
            base.append(done if parents else 0)
            read.append(seat if done else 0)
            write.append(0 if parents else seat)
            if not parents:
                self.texts[request] += own
        token, position, slot, visible = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        table = np.arange(1, 1 + len(trees) * self.num_pages, dtype=np.int32).reshape(len(trees), -1)
        attention = AttentionMetadata(
            query_offsets=np.array(offsets, dtype=np.int32),
            page_table_BP=table,
            base_B=np.array(base, dtype=np.int32),
            slot_N=slot,
            visible_N=visible,
            ancestors_N=np.array(masks, dtype=np.uint64).view(np.int64),
            read_seat_B=np.array(read, dtype=np.int32),
            write_seat_B=np.array(write, dtype=np.int32),
            keep_row_K=np.array([row for row, _ in keeps], dtype=np.int32),
            keep_seat_K=np.array([seat for _, seat in keeps], dtype=np.int32),
        )
        if self._folds is not None and self.kv.states is not None:
            self.model.fold(self._folds, self.kv)
            self._folds = None
        plan = self.model.plan(attention, PAGE)
        hidden = self.model.forward(torch.from_numpy(token), torch.from_numpy(position), plan, self.kv)
        logits = self.model.full_logits(hidden.final_ND)
        return [logits[a:b] for a, b in pairwise(offsets)]

    @torch.inference_mode()
    def accept(self, paths: list[list[int]], tokens: list[list[int]], keeps: Keeps = ()) -> None:
        """Commit the accepted rows, roots included, of the last step's trees. keeps: rows of all paths together."""
        begins = np.cumsum([0, *map(len, tokens)]).tolist()
        moved: tuple[list[int], list[int]] = ([], [])
        for request, rows in enumerate(paths):
            first = (1 + request * self.num_pages) * PAGE + len(self.texts[request])
            moved[0].extend(first + row for row in rows)
            moved[1].extend(first + i for i in range(len(rows)))
            self.texts[request] += [tokens[request][row] for row in rows]
        TORCH.copy_slots(self.kv.data, *map(torch.tensor, moved))
        self._folds = Folds(
            offsets=torch.tensor([0, *np.cumsum(list(map(len, paths)))], dtype=torch.int32),
            row_A=torch.tensor([begins[r] + row for r, rows in enumerate(paths) for row in rows], dtype=torch.int32),
            seat_F=torch.tensor([SEATS - request for request in range(len(paths))], dtype=torch.int32),
            keep_row_K=torch.tensor([row for row, _ in keeps], dtype=torch.int32),
            keep_seat_K=torch.tensor([seat for _, seat in keeps], dtype=torch.int32),
        )


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(96) for _ in range(count)]
