"""N-gram lookup (prompt lookup decoding): drafts that copy what followed the same tokens earlier in the request.

    find_matches(history_T, lengths) -> Matches                the pure core
    NgramProposer(...).extend / .expand -> NgramCandidates     a `drafter.proposers.base.Proposer` without a model

A match is a place in the history that follows the same tokens as the history's end: `lengths.min` to `lengths.max` of
them, where the longest agreement counts. Matches are ordered longest first, then leftmost. A node's candidates are the
distinct tokens at its matches, in that order; a child keeps the matches of its own token, each advanced by one token.
So a chain of first children copies the leftmost longest match to the end of the history (vLLM's `ngram`), and the
siblings along it are the other continuations, including the rightmost one (vLLM's `ngram_gpu`).

Weights: a match of length n counts 2^n - 1, all unseen tokens together count ESCAPE, and q is a token's share; the
depth of a node adds to n. A token weighs at least as much as any that is ordered after it.
Memory: this drafter's KV pool is a pool of token ids on the host, under the same page table as every other pool.
Legend: T history tokens, P matches of all nodes of a level, U their distinct tokens, F nodes, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafter.proposers.base import fed_slots
from drafter.tree.frontier import DraftVocabulary, Frontier, NgramCandidates
from drafter.tree.tree_graphs import TreeGraphs
from workers.config import MAX_TREE_NODES
from workers.cuda_graphs import Graphs
from workers.types import DraftRequest

ESCAPE = 2.0
"""With this value a single match of one token has probability 1/3, of two .6, of five .94."""

_MAX_COUNTED_LENGTH = 16  # longer agreements add nothing, and their weights would drown all others
_TIE = 0.999  # ratio of neighbours of equal weight, so that any sort keeps the order


class MatchLengths(NamedTuple):
    """The shortest and longest match, in tokens."""

    min: int
    max: int


class Matches(NamedTuple):
    """The matches of one history's end, in order."""

    place_P: np.ndarray  # index of the token that follows
    length_P: np.ndarray


def find_matches(history_T: np.ndarray, lengths: MatchLengths) -> Matches:
    """Find where the history's last tokens occurred before, followed by at least one token; overlap is allowed.

    Example: the end of [1, 3, 6, 2, 3, 4, 1, 2, 3] with lengths (1, 2): place [5, 2], length [2, 1].
    """
    size = len(history_T)
    place_P = np.flatnonzero(history_T[:-1] == history_T[-1:]) + 1
    length_P = np.ones_like(place_P)
    for length in range(2, lengths.max + 1):
        longer = np.flatnonzero((length_P == length - 1) & (place_P >= length))
        if not len(longer):
            break
        length_P[longer] += history_T[place_P[longer] - length] == history_T[size - length]
    place_P, length_P = place_P[length_P >= lengths.min], length_P[length_P >= lengths.min]
    order = np.argsort(-length_P, kind="stable")
    return Matches(place_P[order], length_P[order])


class _FrontierMatches(NamedTuple):
    """The matches of a frontier's nodes, sorted by node, then in order."""

    node_code_F: np.ndarray  # ascending, see _code
    node_P: np.ndarray
    place_P: np.ndarray  # in the concatenated histories of all requests
    length_P: np.ndarray


class NgramProposer:
    """Looks candidates up on the host. Every drafter rank finds the same ones, so ranks exchange nothing."""

    BYTES_PER_SLOT = np.dtype(np.int32).itemsize
    width = 0
    graphs: Graphs | None = None
    tree_graphs: TreeGraphs | None = None

    def __init__(self, lengths: MatchLengths, vocab_size: int, num_pages: int, page_size: int) -> None:
        self.vocab = DraftVocabulary(target_size=vocab_size)
        self._lengths = lengths
        self._pages = np.zeros((num_pages, page_size), dtype=np.int32)
        self._text_T = np.zeros(0, dtype=np.int32)
        self._end_G = np.zeros(0, dtype=np.int64)
        self._matches: _FrontierMatches

    def extend(self, request: DraftRequest) -> NgramCandidates:
        """Store the fed tokens and look up the ends of the histories of the requests that want a tree."""
        table_BP, page_size = request.page_table_BP.numpy(), self._pages.shape[1]
        slot_M = fed_slots(request)
        rows_B = request.offsets.diff().numpy()
        owner_M = np.repeat(np.arange(len(rows_B)), rows_B)
        self._pages[table_BP[owner_M, slot_M // page_size], slot_M % page_size] = request.token_M.numpy()

        size_B = request.start_B.numpy() + rows_B
        growing_G = np.flatnonzero(request.num_nodes_B.numpy() > 0)
        histories = [self._pages[table_BP[b, : -(-size_B[b] // page_size)]].reshape(-1)[: size_B[b]] for b in growing_G]
        self._text_T = np.concatenate([np.zeros(0, dtype=np.int32), *histories])
        self._end_G = np.cumsum(size_B[growing_G], dtype=np.int64)
        found = [find_matches(history_T, self._lengths) for history_T in histories]
        start_G = self._end_G - size_B[growing_G]
        empty = np.zeros(0, dtype=np.int64)
        self._matches = _FrontierMatches(
            node_code_F=_code(np.arange(len(histories)), 0),
            node_P=np.repeat(np.arange(len(histories)), [len(matches.place_P) for matches in found]),
            place_P=np.concatenate(
                [empty, *(matches.place_P + start for matches, start in zip(found, start_G, strict=True))]
            ),
            length_P=np.concatenate([empty, *(matches.length_P for matches in found)]),
        )
        return self._candidates()

    def expand(self, frontier: Frontier) -> NgramCandidates:
        """Return the candidates of a frontier of children of the last frontier's nodes."""
        last, vocab_size = self._matches, self.vocab.target_size
        parent_F = np.searchsorted(last.node_code_F, _code(frontier.request_F, frontier.parent_row_F))
        wanted_F = parent_F * vocab_size + frontier.token_F
        ascending = np.argsort(wanted_F)
        offered_P = last.node_P * vocab_size + self._text_T[last.place_P]
        found_P = np.searchsorted(wanted_F, offered_P, sorter=ascending)
        node_P = ascending[np.minimum(found_P, len(ascending) - 1)]
        place_P = last.place_P + 1
        goes_on_P = (wanted_F[node_P] == offered_P) & (place_P < self._end_G[frontier.request_F[node_P]])
        kept = np.flatnonzero(goes_on_P)
        kept = kept[np.argsort(node_P[kept], kind="stable")]
        self._matches = _FrontierMatches(
            node_code_F=_code(frontier.request_F, frontier.row_F),
            node_P=node_P[kept],
            place_P=place_P[kept],
            length_P=last.length_P[kept] + 1,
        )
        return self._candidates()

    def _candidates(self) -> NgramCandidates:
        """Return the distinct tokens at each node's matches, in order, with their shares."""
        matches, vocab_size = self._matches, self.vocab.target_size
        num_nodes = len(matches.node_code_F)
        follower_P = matches.node_P * vocab_size + self._text_T[matches.place_P]
        follower_U, first_U, inverse_P = np.unique(follower_P, return_index=True, return_inverse=True)
        in_order = np.argsort(first_U)
        node_U, token_U = np.divmod(follower_U[in_order], vocab_size)
        value_P = np.exp2(np.minimum(matches.length_P, _MAX_COUNTED_LENGTH)) - 1
        value_U = np.bincount(inverse_P, weights=value_P, minlength=len(follower_U))[in_order]

        num_F = np.bincount(node_U, minlength=num_nodes)
        rank_U = np.arange(len(node_U)) - (np.cumsum(num_F) - num_F)[node_U]
        width = min(int(num_F.max(initial=1)), MAX_TREE_NODES)
        fits = rank_U < width
        token_FK = np.zeros((num_nodes, width), dtype=np.int64)
        token_FK[node_U[fits], rank_U[fits]] = token_U[fits]
        value_FK = np.zeros((num_nodes, width))
        value_FK[node_U[fits], rank_U[fits]] = value_U[fits]
        value_FK = np.maximum.accumulate(value_FK[:, ::-1], axis=1)[:, ::-1] * _TIE ** np.arange(width)
        with np.errstate(divide="ignore"):
            log_q_FK = np.log(value_FK / (value_FK.sum(axis=1, keepdims=True) + ESCAPE))
        return NgramCandidates(token_FK, log_q_FK.astype(np.float32))


def _code(request: np.ndarray, row: np.ndarray | int) -> np.ndarray:
    """Return one number per node of a batch of trees, ascending by request, then row."""
    return (request << 16) + row
