"""What `auto` knows and decides before a step: what things cost here, how far drafts can be trusted, whether to draft.

Measured goodput steers. From what past steps were paid and brought, a step that drafts for the k most promising of the
requests under `auto` is expected to yield

    (R + sum of their gains) / (draft_ms(k) + rest_ms(R + nodes of k))        tokens per millisecond

and k = 0, plain decoding, is one of the choices. The choice between drafting and not drafting is put to the test: the
other one is tried for a step now and then, ever more rarely while it keeps losing. How large the trees of those k are
is then up to the drafter (`drafter.budget`), by the same numbers. Everything here depends on past steps alone, so that
it may decide about sampled trees too. Legend: B requests, N packed rows, K choices.
"""

from __future__ import annotations

import numpy as np
import torch

from verifier.calibration import Calibration
from verifier.costs import Bill, RowCosts
from verifier.drafts import Drafts
from verifier.pack import Feed
from verifier.request import Request
from verifier.scheduler import Step
from workers.types import DraftCosts, Rule, Verdict

MAX_BACKLOG = 256
"""Tokens that the drafter may be owed by a request that it does not draft for. Feeding later costs no more, and often
the request is finished before."""
_FIRST_PATIENCE, _MAX_PATIENCE = 8, 64  # steps between two tries of what is not chosen
_HYSTERESIS = 1.02
_FIRST_GAIN = 2.0
_RATE_OF_REQUEST, _RATE_OF_ALL = 0.2, 0.05


class Economy:
    """Owned by the engine; `verify` is what start-up measured."""

    def __init__(self, verify: RowCosts) -> None:
        self._verify = verify
        row = float(verify.ms(1))
        # Prices: of a message, of a row fed, of a further level, and of a request on that level.
        self._draft_bill = Bill(0.2 * row, 0.01 * row, 0.1 * row, 0.01 * row)
        # Of a step, of a millisecond of the table, and of a request.
        self._rest_bill = Bill(0.05 * row, 1.0, 0.02 * row)
        self._calibration = Calibration()
        self._gain = _FIRST_GAIN  # tokens that a tree adds, and what it takes
        self._num_nodes = 8.0
        self._num_levels = 4.0
        self._is_on = True
        self._is_trial = False
        self._waited, self._patience = 0, _FIRST_PATIENCE
        self._rate_off = 0.0  # expected of this step without drafts
        self._draft_ms = 0.0  # paid in this step

    # ---- before a step

    def worthwhile(self, feeds: dict[Request, Feed], step: Step) -> dict[Request, Feed]:
        """What the drafter shall hear of: no trees that do not pay, and no feeds without trees that can wait."""
        self._draft_ms = 0.0
        auto = [r for r, feed in feeds.items() if feed.num_nodes and _is_auto(r)]
        others = [r for r, feed in feeds.items() if feed.num_nodes and not _is_auto(r)]
        chosen = set(self._choose(auto, others, step)) if auto else set()
        kept = {}
        for request, feed in feeds.items():
            if request in chosen or not _is_auto(request):
                kept[request] = feed
            elif len(feed.tokens) > MAX_BACKLOG:
                kept[request] = Feed(feed.tokens, 0, 0)
        return kept

    def _choose(self, auto: list[Request], others: list[Request], step: Step) -> list[Request]:
        ranked = sorted(auto, key=self._gain_of, reverse=True)
        count_K = np.arange(len(ranked) + 1)
        gain_K = np.cumsum([sum(map(self._gain_of, others)), *map(self._gain_of, ranked)])
        other_nodes = sum(r.limits.num_nodes for r in others if r.limits)
        trees_K = count_K + len(others)
        num_rows = _num_rows(step)
        rest_ms_K = self._rest_ms(num_rows + other_nodes + count_K * self._num_nodes, len(step.decode))
        fed_K = trees_K + gain_K  # an old backlog has to be paid for in any case
        draft_ms_K = self._draft_bill.price(1, fed_K, self._num_levels - 1, (self._num_levels - 1) * trees_K)
        rate_K = (len(step.decode) + gain_K) / (rest_ms_K + draft_ms_K * (trees_K > 0))
        best = 1 + int(rate_K[1:].argmax())
        self._rate_off = float(rate_K[0])
        if self._tries(rate_K[best] / rate_K[0]):
            return ranked[:best]
        if not self._is_trial:
            return []
        # A trial among few, and of those that owe the drafter least.
        return sorted(auto, key=lambda r: r.num_feedable - r.num_fed)[: -(-len(auto) // 4)]

    def _tries(self, advantage: float) -> bool:
        """Whether to draft for the best, `advantage` being the expected rate with drafts over the one without."""
        self._is_trial = False
        prefers = advantage * _HYSTERESIS > 1 if self._is_on else advantage > _HYSTERESIS
        if prefers != self._is_on:
            self._is_on, self._waited, self._patience = prefers, 0, _FIRST_PATIENCE
        self._waited += 1
        if self._waited > self._patience:
            self._is_trial = True
            self._waited, self._patience = 0, min(2 * self._patience, _MAX_PATIENCE)
        return self._is_on and not self._is_trial

    def _gain_of(self, request: Request) -> float:
        return self._gain if request.draft_gain is None else request.draft_gain

    def _rest_ms(self, num_rows: np.ndarray, num_requests: int) -> np.ndarray:
        return self._rest_bill.price(1, self._verify.ms(num_rows), num_requests)

    def costs(self, feeds: dict[Request, Feed], step: Step) -> DraftCosts | None:
        """For the drafter; None if nobody asks for `auto`."""
        if not any(feed.num_nodes and _is_auto(r) for r, feed in feeds.items()):
            return None
        num_rows, most = _num_rows(step), sum(feed.num_nodes for feed in feeds.values())
        knots = self._verify.rows_T - num_rows
        nodes_T = np.array([0, *knots[(knots > 0) & (knots < most)], most])
        num_fed, num_trees = _fed(feeds)
        first_ms = self._draft_bill.price(1, num_fed, 0, 0)
        level_ms = self._draft_bill.price(0, 0, 1, num_trees)
        return DraftCosts(
            nodes_T=torch.from_numpy(nodes_T.astype(np.int32)),
            verify_ms_T=torch.from_numpy(self._rest_ms(num_rows + nodes_T, len(step.decode)).astype(np.float32)),
            draft_ms_2=torch.tensor([float(first_ms), float(level_ms)]),
            sure_1=torch.tensor([len(step.decode)], dtype=torch.float32),
            calibration_D2=torch.from_numpy(self._calibration.fit_D2),
        )

    # ---- after it

    def learn_draft(self, feeds: dict[Request, Feed], num_levels: int, seconds: float) -> None:
        """What an exchange with the drafter took."""
        num_fed, num_trees = _fed(feeds)
        further = max(num_levels - 1, 0)
        self._draft_ms = 1e3 * seconds
        self._draft_bill.paid(self._draft_ms, 1, num_fed, further, further * num_trees)
        if num_trees:
            self._num_levels += _RATE_OF_ALL * (num_levels - self._num_levels)

    def learn(self, step: Step, drafts: Drafts, verdicts: list[Verdict], seconds: float) -> None:
        """What a step brought, and what it took."""
        rest_ms = 1e3 * seconds - self._draft_ms
        num_rows = len(drafts.trees.token_N) + _num_rows(step) - len(step.decode)
        if step.decode and not step.prefill:  # prompts would blur what a tree's rows cost
            self._rest_bill.paid(rest_ms, 1, float(self._verify.ms(num_rows)), len(step.decode))
        auto_B = np.array([_is_auto(r) and any(nodes) for r, nodes in zip(step.decode, drafts.verified, strict=True)])
        if not auto_B.any():
            for request in step.decode:
                if request.draft_gain is not None:
                    request.draft_gain += 0.1 * _RATE_OF_REQUEST * (self._gain - request.draft_gain)
            return
        for request, verdict, is_drafted in zip(step.decode, verdicts, auto_B, strict=False):
            if is_drafted:
                gain = self._gain_of(request)
                request.draft_gain = gain + _RATE_OF_REQUEST * (len(verdict.path) - gain)
        mine = [(len(v.path), v.num_verified) for v, is_mine in zip(verdicts, auto_B, strict=False) if is_mine]
        accepted, verified = np.mean(mine, axis=0)
        self._gain += _RATE_OF_ALL * (accepted - self._gain)
        self._num_nodes += _RATE_OF_ALL * (verified - self._num_nodes)
        num_tokens = sum(len(verdict.tokens) for verdict in verdicts)
        if self._is_trial and num_tokens > self._rate_off * 1e3 * seconds:
            self._patience = 1  # try it again at once
        is_exact_B = np.array([r.rule < Rule.TRAVERSAL for r in step.decode])
        self._calibration.learn(drafts.trees, verdicts[: len(step.decode)], auto_B & is_exact_B)


def _is_auto(request: Request) -> bool:
    return request.limits is not None and request.limits.auto


def _num_rows(step: Step) -> int:
    """Rows of the target that the step holds without any draft."""
    return len(step.decode) + sum(chunk.stop - chunk.start for _, chunk in step.prefill)


def _fed(feeds: dict[Request, Feed]) -> tuple[int, int]:
    """Rows fed and trees asked for."""
    return sum(len(feed.tokens) for feed in feeds.values()), sum(feed.num_nodes > 0 for feed in feeds.values())
