"""Predicted decoding speed of a batch, and the tree size with the highest throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.planner.acceptance import AcceptanceCurve
from cluster.planner.cost_model import PlannerCostModel, StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`batch` requests of `context` cached tokens each, decoding with trees of `nodes`, step after step."""

    batch: int
    nodes: int
    context: float
    step: StepTime
    accepted: float
    """Draft tokens per step and request."""
    num_devices: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one request per step: the accepted ones and the target's own."""
        return 1 + self.accepted

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole batch."""
        return 1e3 * self.batch * self.tokens_per_step / self.step.ms

    @property
    def per_request(self) -> float:
        """Tokens per second of one request."""
        return self.tokens_per_second / self.batch

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_second / self.num_devices


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts an engine's step from its costs and its acceptance curve."""

    costs: PlannerCostModel
    accepted: AcceptanceCurve
    num_devices: int = 1

    def __call__(self, batch: int, nodes: int, context: float) -> Prediction:
        """Predict `batch` requests with trees of `nodes` and `context` cached tokens each."""
        return Prediction(
            batch=batch,
            nodes=nodes,
            context=context,
            step=self.costs.decode(batch, nodes, context),
            accepted=float(self.accepted[nodes]),
            num_devices=self.num_devices,
        )


def best(predict: Predictor, batch: int, context: float, budgets: Sequence[int]) -> Prediction:
    """Return the budget with the highest throughput, the smallest of equals. A budget of 0 turns speculation off."""
    return max((predict(batch, nodes, context) for nodes in sorted(budgets)), key=lambda p: p.tokens_per_second)


def schedule(predict: Predictor, max_batch: int, context: float, budgets: Sequence[int]) -> list[int]:
    """Return [max_batch + 1] the best budget by batch size; index 0 is unused."""
    return [0, *(best(predict, batch, context, budgets).nodes for batch in range(1, max_batch + 1))]
