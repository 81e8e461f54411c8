"""Scores a candidate head beside the serving one, on what was just verified. It drafts nothing.

    canary.saw(message)      keep its rows; after as many messages as were asked for, score what is left and let go
    canary.work()            score one window, in the time before the next message
    canary.told()            the scores so far

Legend: N rows of a window, D depths, V vocabulary, H width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.learning.learner import (
    CANARY_WINDOWS,
    FEWEST_WINDOWS,
    SURE,
    WEIGHTS,
    Network,
    Slices,
    gain,
    index_of,
    reached,
    spread,
    trained_tensors,
)
from drafter.learning.reservoir import Reservoir
from workers.models.specs import Eagle3Spec
from workers.types import DraftRequest


class ScoredHead(NamedTuple):
    """A head as it is scored. embed: its embeddings [N, H] of target tokens."""

    network: Network
    embed: Callable[[Tensor], Tensor]

    @staticmethod
    def load(spec: Eagle3Spec, folder: str, embed: Callable[[Tensor], Tensor]) -> ScoredHead:
        """Read a head's folder. Raises ValueError, OSError."""
        network = Network(spec).requires_grad_(False)
        network.load_state_dict(trained_tensors(spec, load_file(Path(folder) / WEIGHTS)))
        return ScoredHead(network, embed)


class Canary(Slices):
    """Both heads, and their scores on windows of requests that may be learnt from.

    heads: the serving one and the candidate, let go of after the last score. target_ids: the draft vocabulary, which
    both have. model: the candidate's folder. num_steps: messages to be seen.
    """

    def __init__(
        self, heads: tuple[ScoredHead, ScoredHead], target_ids: Tensor, vocab_size: int, model: str, num_steps: int
    ) -> None:
        super().__init__(Reservoir(CANARY_WINDOWS, fresh_share=1.0))
        self._heads: tuple[ScoredHead, ScoredHead] | None = heads
        self._index_V, self._model, self.steps_left = index_of(target_ids, vocab_size), model, num_steps
        self._scores: list[tuple[Tensor, Tensor]] = []  # of each window, [D] of both heads
        self._num_tokens = 0
        self._slices = self._score()

    def saw(self, message: DraftRequest) -> None:
        """Keep the rows of a message that was replied to."""
        super().saw(message)
        if message.candidate_MH is None or not self.steps_left:
            return
        assert message.features_MH is not None
        both_MH = torch.cat([message.features_MH.float(), message.candidate_MH], 1)
        self.reservoir.add(replace(message, features_MH=both_MH))
        self.steps_left -= 1
        if not self.steps_left:
            self.reservoir.sweep(0)
            self._let_go()

    @property
    def has_work(self) -> bool:
        """Return whether there is a window to score."""
        return bool(self.reservoir.fresh)

    def _score(self) -> Iterator[None]:
        while self._heads is not None:
            window = self.reservoir.fresh.pop(0)
            width = window.features_NH.shape[1] // 2
            serving, candidate = (
                reached(head.network, head.embed, self._index_V, window._replace(features_NH=own))
                for head, own in zip(self._heads, window.features_NH.split(width, 1), strict=True)
            )
            self._scores.append((serving, candidate))
            self._num_tokens += len(window.token_N) - window.begin
            self._let_go()
            yield

    def _let_go(self) -> None:
        if not self.steps_left and not self.has_work:
            self._heads, self.reservoir = None, Reservoir(0)

    def told(self) -> str:
        """Return the scores as JSON: for each depth, the expected share of chains that are accepted up to it."""
        own: dict[str, Any] = {"model": self._model, "steps_left": self.steps_left, "num_tokens": self._num_tokens}
        own["windows_left"] = len(self.reservoir.fresh)
        if len(self._scores) < 2:
            return json.dumps(own | {"verdict": TOO_FEW})
        for name, scores in zip(("serving", "candidate"), zip(*self._scores, strict=True), strict=True):
            depths = [spread(depth_W) for depth_W in torch.stack(scores).T.tolist()]
            own[name] = {"acceptance": [mean for mean, _ in depths], "standard_error": [error for _, error in depths]}
        mean, error = gain([(float(old.sum()), float(new.sum())) for old, new in self._scores])
        own |= {"gain": mean, "gain_standard_error": error}
        return json.dumps(own | {"verdict": verdict(mean, error, len(self._scores))})


TOO_FEW = "too few tokens"


def verdict(mean: float, error: float, num_windows: int) -> str:
    """Return what is known of a candidate whose gain was measured on so many windows."""
    if num_windows < FEWEST_WINDOWS:
        return TOO_FEW
    return "better" if mean > SURE * error else "worse" if mean < -SURE * error else "no difference"
