"""Compares what the target accepts of a draft model's trees with what its training promised.

A head for another model, one with empty weights, and one whose traffic has drifted away all draft, and only cost time.
Legend: K kinds of requests (greedy, sampled), D depths, B requests, N packed rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workers.comm.ipc import EngineStats
from workers.types import TreeBatch, Verdict

NUM_DEPTHS = 8
RECORD = "training.json"
"""In the folder of a head that `training.head` made: agreement and acceptance by depth, on held-out answers."""
_MEMORY = 0.998
"""The part of a kind's counts that is left with each later tree: the shares are those of some 500 trees."""
_FEWEST_TREES = 200.0
_BAND = 0.5
"""A share below this part of what the training measured is amiss. More than one child raises shares, other prompts
lower them."""
_LEAST_PROMISE = 0.1
"""The share of first tokens that is expected where the folder has no record."""
_KINDS = ("greedy", "sampled")
_REPORT_EVERY = 50  # trees


class HeadAcceptance:
    """The shares of one draft model, since it began to draft. folder: its checkpoint."""

    def __init__(self, folder: str) -> None:
        self._promised_KD = _promised(Path(folder))
        self._counts_2KD = np.zeros((2, len(_KINDS), NUM_DEPTHS))  # depths reached, and accepted there
        self._num_trees = self._num_accepted = self._num_reported = 0

    def observe(self, trees: TreeBatch, verdicts: Sequence[Verdict], kind_B: Sequence[int]) -> None:
        """Count a step's trees. kind_B: 0 = a greedy request, 1 = a sampled one, -1 = no tree of the draft model.

        A depth counts where the accepted path leads to a node with children there.
        """
        offsets, depth_N, parent_N = trees.offsets.numpy(), trees.depth_N.numpy(), trees.parent_N.numpy()
        has_children_N = np.zeros(len(parent_N), dtype=bool)
        has_children_N[(offsets[:-1].repeat(np.diff(offsets)) + parent_N)[depth_N > 0]] = True
        ends = [begin + (0, *verdict.path)[-1] for begin, verdict in zip(offsets[:-1].tolist(), verdicts, strict=True)]
        new_2KD = np.zeros_like(self._counts_2KD)
        for kind, verdict, goes_on in zip(kind_B, verdicts, has_children_N[ends].tolist(), strict=True):
            num_accepted = len(verdict.path[:NUM_DEPTHS])
            num_reached = min(len(verdict.path) + goes_on, NUM_DEPTHS)
            if kind < 0 or not num_reached:
                continue
            new_2KD[0, kind, :num_reached] += 1
            new_2KD[1, kind, :num_accepted] += 1
            self._num_trees += 1
            self._num_accepted += num_accepted
        self._counts_2KD = self._counts_2KD * _MEMORY ** new_2KD[:1, :, :1] + new_2KD

    def report(self, stats: EngineStats) -> None:
        """Write the counts into the engine's statistics, and now and then the shares and what is amiss with them."""
        stats.num_head_trees, stats.num_head_accepted_tokens = self._num_trees, self._num_accepted
        if self._num_reported and self._num_trees < self._num_reported + _REPORT_EVERY:
            return
        self._num_reported = self._num_trees
        reached_KD, accepted_KD = self._counts_2KD
        share_KD = accepted_KD / np.maximum(reached_KD, 1.0)
        stats.greedy_acceptance, stats.sampled_acceptance = (
            row[reached > 0].round(4).tolist() for row, reached in zip(share_KD, reached_KD, strict=True)
        )
        error_KD = np.sqrt(np.maximum(share_KD * (1 - share_KD), 1e-4) / np.maximum(reached_KD, 1.0))
        is_amiss_KD = (reached_KD >= _FEWEST_TREES) & (share_KD + 3 * error_KD < _BAND * self._promised_KD)
        stats.head_note = ""
        for kind, depth in np.argwhere(is_amiss_KD)[:1]:
            stats.head_note = (
                f"of the {_KINDS[kind]} requests' drafts at depth {depth + 1}, {share_KD[kind, depth]:.3f} were "
                f"accepted lately, where {self._promised_KD[kind, depth]:.2f} are expected: the draft model may be "
                "another target's, broken, or trained on other traffic; swap in another one"
            )


def _promised(folder: Path) -> np.ndarray:
    """Return the shares [K, D] that the folder's record promises. Deeper depths are like its last one."""
    promised_KD = np.zeros((len(_KINDS), NUM_DEPTHS))
    promised_KD[:, 0] = _LEAST_PROMISE
    try:
        last = json.loads((folder / RECORD).read_text())["log"][-1]
        for row, name in enumerate(("agreement", "acceptance")):
            shares = np.array(last.get(name) or last["agreement"], dtype=float)[:NUM_DEPTHS]
            promised_KD[row] = np.pad(shares, (0, NUM_DEPTHS - len(shares)), mode="edge")
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        pass  # no record, or somebody else's
    return promised_KD
