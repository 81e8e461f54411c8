"""Pre-drafting: while the target verifies, the drafter grows the next trees below the likeliest outcomes.

Under the coupled rule the target draws argmax(log p + G) at every node, and the drafter knows the noise G. So each node
of the tree that is being verified has likely outcomes: the best tokens by log q + G that are not among its children.
Such a token is a predicted bonus token behind the node's path, and the root of a next tree. If one of the predictions
holds, the reply to the next message is ready when it arrives, and the message's rows are fed after the reply.

    reply        answers a message from the pre-drafted trees, or drafts as usual
    draft_ahead  feeds the message's rows if that has waited, reads its trees, and grows a tree for each outcome

Trees under the coupled rule may have any form, so what is predicted, and when, never changes a token. Sampled trees
(`rejection`) may not depend on timing, and constraints depend on the path: a message with such requests is drafted as
usual. Outcomes use scratch pages behind a copy of the root's page, so the request's own pages hold what they held.

Legend: G growing requests, N nodes of their trees, O outcomes, K candidates, V draft vocabulary, H feature width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.proposers.base import ModelProposer, root_rows
from drafter.tree.frontier import Frontier, RootLogits
from drafter.tree.grow import GrownTrees
from drafter.tree.score import score
from workers.settings import Rule
from workers.types import DraftCosts, DraftReply, DraftRequest, NodeKind, TreeBatch, TreeTrace

NUM_CANDIDATES = 16
"""Tokens of a node that are looked at: its children, and what may come instead of them."""
MAX_FANOUT = 16
"""Most outcomes of a request that are drafted for."""
_MIN_CHANCE = 0.01
"""Less likely outcomes are not drafted for."""
_RETRY_EVERY = 64
"""How many messages pass before pre-drafting is tried again where it took longer than the target."""
_RATE = 0.1  # of the averages

Grow = Callable[[DraftRequest, RootLogits], GrownTrees]
"""Grows a tree for each growing request of a message whose rows were fed, given the logits at the roots."""


class _Outcome(NamedTuple):
    """One request's rows of the next message, if a prediction holds."""

    start: int  # slot of the first fed row
    tokens: tuple[int, ...]  # accepted path and bonus token
    seed: int
    page: int  # of the row before


class _Prediction(NamedTuple):
    """A likely outcome of one request's verification."""

    g: int
    path: list[int]  # rows of the accepted nodes
    bonus: int
    chance: float


class PreDrafter:
    """Replies to messages, and works ahead between them.

    grow: see `Grow`. scratch: page ids of the drafter's pool that no request has. outcome_pages: how many of them one
    outcome uses. is_forced: work ahead even where that takes longer than the target.
    """

    def __init__(
        self,
        proposer: ModelProposer,
        grow: Grow,
        *,
        page_size: int,
        scratch: Sequence[int],
        outcome_pages: int,
        is_forced: bool,
    ) -> None:
        self._proposer, self._grow = proposer, grow
        self._page_size = page_size
        self._scratch_OP = torch.tensor(scratch, dtype=torch.int32).reshape(-1, outcome_pages)
        self._is_forced = is_forced
        self._fanout = MAX_FANOUT if is_forced else 4
        self._request: DraftRequest | None = None  # the last message
        self._trees: TreeBatch  # of its reply
        self._roots: RootLogits | None = None  # of its trees; None = its rows are not fed yet
        self._grown: GrownTrees | None = None  # trees below the predicted outcomes ...
        self._tree_of: dict[_Outcome, int] = {}  # ... and which of them belongs to which
        self._replied_at = 0.0
        self._ahead_s: float | None = None  # average time that working ahead takes
        self._gap_s: float | None = None  # average time between a reply and the next message
        self._num_skipped = 0

    @torch.inference_mode()
    def reply(self, request: DraftRequest, *, has_waited: bool = False) -> DraftReply:
        """Return the trees for a message. has_waited: it arrived while this side was working."""
        began = time.perf_counter()
        if self._replied_at:
            gap_s = began - self._replied_at  # of a message that has waited, more than the target took
            if not has_waited or self._gap_s is None or gap_s < self._gap_s:
                self._gap_s = _average(self._gap_s, gap_s)
        trees_G = self._predrafted(request) if _can_predict(request) else []
        num_hits = sum(tree is not None for tree in trees_G)
        # A batch does not wait for the requests whose outcome was not predicted: they verify their roots alone.
        if num_hits == len(trees_G) > 0 or (len(trees_G) > 1 and 2 * num_hits >= len(trees_G)):
            assert self._grown is not None
            grown, self._roots = _select(self._grown, trees_G, request), None
        else:
            num_hits = 0
            self._roots = self._proposer.extend(request)
            grown = self._grow(request, self._roots)
        self._request, self._trees = request, grown.trees
        self._grown, self._tree_of = None, {}
        self._replied_at = time.perf_counter()
        return grown.reply(self._replied_at - began, num_hits)

    @torch.inference_mode()
    def draft_ahead(self, is_interrupted: Callable[[], bool]) -> None:
        """Finish the last message, then draft for the predicted outcomes, unless the next message arrives first."""
        request, began = self._request, time.perf_counter()
        if request is None:
            return
        if self._roots is None:
            self._roots = self._proposer.extend(request)
        self._request = None
        if not _can_predict(request) or not self._has_time():
            return
        is_done = self._draft_outcomes(request, self._roots, is_interrupted)
        elapsed_s = time.perf_counter() - began
        # Growing the trees takes about as long as reading the last ones.
        self._ahead_s = _average(self._ahead_s, elapsed_s if is_done else 2 * elapsed_s)

    def _draft_outcomes(self, request: DraftRequest, roots: RootLogits, is_interrupted: Callable[[], bool]) -> bool:
        """Grow trees below the predicted outcomes; return False if the next message arrived first."""
        logits_GV = roots() if callable(roots) else roots
        assert isinstance(logits_GV, Tensor), "n-gram lookup does not draft ahead"
        predictions = self._predict(request, logits_GV, is_interrupted)
        if predictions is None or is_interrupted():
            return False
        if predictions:
            message = self._message(request, predictions)
            self._grown = self._grow(message, self._proposer.extend(message))
            self._tree_of = self._outcomes(request, predictions)
        return True

    def _has_time(self) -> bool:
        """Set the number of outcomes by the time that they took so far; return whether there is time for any."""
        if self._is_forced or self._ahead_s is None or self._gap_s is None:
            return True
        if self._ahead_s > self._gap_s:
            if self._fanout == 1:
                self._num_skipped = (self._num_skipped + 1) % _RETRY_EVERY
                return self._num_skipped == 0
            self._fanout //= 2
            self._ahead_s = None
        elif 2 * self._ahead_s < self._gap_s and self._fanout < MAX_FANOUT:
            self._fanout *= 2
            self._ahead_s = None
        return True

    def _predrafted(self, request: DraftRequest) -> list[int | None]:
        """Return each growing request's tree among the pre-drafted ones."""
        growing = np.flatnonzero(request.num_nodes_B.numpy() > 0)
        if self._grown is None:
            return [None] * len(growing)
        offsets, tokens = request.offsets.tolist(), request.token_M.tolist()
        trees, depth_N = self._grown.trees, self._grown.trees.depth_N.numpy()
        ends = trees.offsets.tolist()
        found: list[int | None] = []
        for b in growing.tolist():
            own = tuple(tokens[offsets[b] : offsets[b + 1]])
            tree = self._tree_of.get(self._outcome(request, b, int(request.start_B[b]), own))
            if tree is not None:
                size, depth = ends[tree + 1] - ends[tree], int(depth_N[ends[tree + 1] - 1])
                if size - 1 > request.num_nodes_B[b] or depth > request.max_depth_B[b]:
                    tree = None
            found.append(tree)
        return found

    def _predict(
        self, request: DraftRequest, logits_GV: Tensor, is_interrupted: Callable[[], bool]
    ) -> list[_Prediction] | None:
        """Read the trees of the reply once more, and return the likeliest outcomes; None if the next message arrives.

        The root's feature is the target's own now, and the candidates that were not chosen are kept this time.
        """
        owner_G = torch.nonzero(request.num_nodes_B > 0)[:, 0]
        index_G = (request.start_B + request.offsets.diff())[owner_G].numpy()
        trees, offsets = self._trees, self._trees.offsets.numpy()
        token_N, parent_N, depth_N = (
            a.numpy().astype(np.int64) for a in (trees.token_N, trees.parent_N, trees.depth_N)
        )
        owner_N = np.arange(len(offsets) - 1).repeat(np.diff(offsets))
        row_N = np.arange(len(token_N)) - offsets[owner_N]
        survival_N = [1.0] * len(token_N)
        paths: list[list[int]] = [[] for _ in token_N]  # rows below the root
        children: list[dict[int, int]] = [{} for _ in token_N]  # token -> node
        for n in np.flatnonzero(parent_N >= 0).tolist():
            parent = int(offsets[owner_N[n]] + parent_N[n])
            children[parent][int(token_N[n])] = n
            paths[n] = [*paths[parent], int(row_N[n])]
        predictions: list[list[_Prediction]] = [[] for _ in owner_G]
        for depth in range(int(depth_N.max()) + 1):
            at, logits = np.flatnonzero(depth_N == depth), logits_GV
            if depth:
                if is_interrupted():
                    return None
                ancestors = trees.ancestors_N.numpy()[at]
                frontier = Frontier(depth, owner_N[at], row_N[at], parent_N[at], token_N[at], ancestors)
                expanded = self._proposer.expand(frontier)
                assert isinstance(expanded, Tensor)
                logits = expanded
            b = owner_G[torch.from_numpy(owner_N[at])]
            scores = score(
                logits,
                request.sampling.rows(b),
                request.rule_B[b].numpy(),
                index_G[owner_N[at]] + depth,
                NUM_CANDIDATES,
                self._proposer.vocab,
            )
            for n, tokens, weights in zip(
                at.tolist(), scores.token_FK.tolist(), scores.weight_FK.tolist(), strict=True
            ):
                chances = {token: survival_N[n] * weight for token, weight in zip(tokens, weights, strict=True)}
                for token, child in children[n].items():
                    survival_N[child] = chances.pop(token, 0.0)
                g = int(owner_N[n])
                predictions[g] += [
                    _Prediction(g, paths[n], token, chance) for token, chance in chances.items() if chance > _MIN_CHANCE
                ]
        likeliest = [sorted(own, key=lambda p: -p.chance)[: self._fanout] for own in predictions]
        return sorted((p for own in likeliest for p in own), key=lambda p: -p.chance)[: len(self._scratch_OP)]

    def _message(self, request: DraftRequest, predictions: Sequence[_Prediction]) -> DraftRequest:
        """Return the message that would come with these outcomes, each a request with scratch pages of its own."""
        size = self._page_size
        owner_G = torch.nonzero(request.num_nodes_B > 0)[:, 0]
        root_G = (request.start_B + request.offsets.diff() - 1)[owner_G].tolist()
        pages_GP = request.page_table_BP[owner_G].tolist()
        rows, tokens, sources, targets = [], [], [], []
        scratch_OP = self._scratch_OP[: len(predictions)]
        width = max(root_G[p.g] // size for p in predictions) + scratch_OP.shape[1]
        table_OP = torch.zeros(len(predictions), width, dtype=torch.int32)
        offsets = self._trees.offsets.tolist()
        for o, p in enumerate(predictions):
            before, within = divmod(root_G[p.g], size)
            table_OP[o, :before] = torch.tensor(pages_GP[p.g][:before], dtype=torch.int32)
            table_OP[o, before : before + scratch_OP.shape[1]] = scratch_OP[o]
            sources += [pages_GP[p.g][before] * size + slot for slot in range(within + 1)]
            targets += [int(scratch_OP[o, 0]) * size + slot for slot in range(within + 1)]
            rows += [(p.g, row) for row in (0, *p.path)]
            tokens += [*self._trees.token_N[[offsets[p.g] + row for row in p.path]].tolist(), p.bonus]
        self._proposer.copy_slots(torch.tensor(sources), torch.tensor(targets))
        features = self._proposer.node_features
        g, row = (torch.tensor(index) for index in zip(*rows, strict=True))
        owner_O = owner_G[[p.g for p in predictions]]
        return replace(
            request,
            offsets=torch.tensor([0, *np.cumsum([len(p.path) + 1 for p in predictions])], dtype=torch.int32),
            start_B=torch.tensor([root_G[p.g] + 1 for p in predictions], dtype=torch.int32),
            token_M=torch.tensor(tokens, dtype=torch.int32),
            page_table_BP=table_OP,
            features_MH=None if features is None else features[g.to(features.device), row.to(features.device)],
            sampling=request.sampling.rows(owner_O),
            traced_B=None if request.traced_B is None else request.traced_B[owner_O],
            costs=None if request.costs is None else _for_outcomes(request.costs, len(predictions) / len(owner_G)),
            **{name: getattr(request, name)[owner_O] for name in _LIMITS},
        )

    def _outcomes(self, request: DraftRequest, predictions: Sequence[_Prediction]) -> dict[_Outcome, int]:
        """Return which pre-drafted tree belongs to which outcome."""
        owners = torch.nonzero(request.num_nodes_B > 0)[:, 0].tolist()
        start_B = (request.start_B + request.offsets.diff()).tolist()
        offsets, tokens = self._trees.offsets.tolist(), self._trees.token_N.tolist()
        outcomes = {}
        for tree, p in enumerate(predictions):
            b, path = owners[p.g], [tokens[offsets[p.g] + row] for row in p.path]
            outcomes[self._outcome(request, b, start_B[b], (*path, p.bonus))] = tree
        return outcomes

    def _outcome(self, request: DraftRequest, b: int, start: int, tokens: tuple[int, ...]) -> _Outcome:
        page = int(request.page_table_BP[b, (start - 1) // self._page_size])
        return _Outcome(start, tokens, int(request.sampling.seed_B[b]), page)


def _for_outcomes(costs: DraftCosts, num_each: float) -> DraftCosts:
    """Return costs for sizing the trees of all outcomes at once, as if each were verified in a step of its own.

    num_each: outcomes per request, of which one comes true. With the step's own costs all would share its rows.
    """
    num_each = max(1.0, num_each)  # some requests may have none
    return replace(
        costs,
        nodes_T=(costs.nodes_T * num_each).round().int(),
        verify_ms_T=costs.verify_ms_T * num_each,
        draft_ms_3=costs.draft_ms_3 * torch.tensor([num_each, num_each, 1]),
        base_tokens_1=costs.base_tokens_1 * num_each,
    )


def _can_predict(request: DraftRequest) -> bool:
    """Return whether all growing requests are coupled and unconstrained."""
    growing = request.num_nodes_B > 0
    is_free = (request.rule_B[growing] == Rule.COUPLED.value).all()
    return bool(growing.any()) and bool(is_free) and request.constraints_U.numel() == 0


def _select(grown: GrownTrees, trees_G: Sequence[int | None], request: DraftRequest) -> GrownTrees:
    """Return the chosen trees in this order, as a level of no work; None stands for a root alone."""
    roots = request.token_M[root_rows(request)]
    return GrownTrees(
        trees=_trees(grown.trees, trees_G, roots),
        probs=None,
        pruned_BD=np.stack([grown.pruned_BD[tree] if tree is not None else 0 * grown.pruned_BD[0] for tree in trees_G]),
        num_levels=1,
        num_run=0,
        trace=None if grown.trace is None else _traces(grown.trace, trees_G, request, roots),
    )


def _trees(trees: TreeBatch, trees_G: Sequence[int | None], roots: Tensor) -> TreeBatch:
    one = torch.zeros(1, dtype=torch.int32)
    alone = {
        "parent_N": one - 1,
        "depth_N": one,
        "ancestors_N": one.long() + 1,
        "kind_N": one.byte() + NodeKind.ROOT.value,
        "weight_N": one.float() + 1,
    }
    parts = []
    for g, tree in enumerate(trees_G):
        if tree is None:
            parts.append({"token_N": roots[g : g + 1], **alone})
        else:
            own = slice(*trees.offsets[tree : tree + 2].tolist())
            parts.append({name: getattr(trees, name)[own] for name in ("token_N", *alone)})
    return TreeBatch(**_joined(parts))


def _traces(trace: TreeTrace, trees_G: Sequence[int | None], request: DraftRequest, roots: Tensor) -> TreeTrace:
    assert request.traced_B is not None
    is_asked_G = request.traced_B[request.num_nodes_B > 0].tolist()
    one = torch.zeros(1, dtype=torch.int32)
    alone = {
        "parent_T": one - 1,
        "depth_T": one,
        "prob_T": one.float() + 1,
        "weight_T": one.float() + 1,
        "reason_T": one.byte(),
    }
    parts = []
    for g, tree in enumerate(trees_G):
        if tree is None and is_asked_G[g]:
            parts.append({"token_T": roots[g : g + 1], **alone})
        else:
            own = slice(*trace.offsets[tree : tree + 2].tolist()) if tree is not None else slice(0)
            parts.append({name: getattr(trace, name)[own] for name in ("token_T", *alone)})
    return TreeTrace(**_joined(parts))


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the columns of several trees as those of one batch, with offsets."""
    sizes = torch.tensor([0, *(len(next(iter(part.values()))) for part in parts)], dtype=torch.int32)
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {"offsets": sizes.cumsum(0, dtype=torch.int32), **columns}


_LIMITS = ("rule_B", "auto_B", "num_nodes_B", "max_depth_B", "min_prob_B", "path_prob_B")


def _average(average: float | None, value: float) -> float:
    return value if average is None else average + _RATE * (value - average)
