"""What a batch of decoding requests gets: step time, accepted length, tokens per second and per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.planner.acceptance import AcceptanceCurve
from cluster.planner.cost_model import CostModel, StepTime


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
        """Of one request: what was accepted, and the target's own token."""
        return 1 + self.accepted

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return 1e3 * self.batch * self.tokens_per_step / self.step.ms

    @property
    def per_request(self) -> float:
        return self.tokens_per_second / self.batch

    @property
    def per_device(self) -> float:
        return self.tokens_per_second / self.num_devices


@dataclass(frozen=True, slots=True)
class Predictor:
    """An engine on some devices: what its steps take and bring."""

    costs: CostModel
    accepted: AcceptanceCurve
    num_devices: int = 1

    def __call__(self, batch: int, nodes: int, context: float) -> Prediction:
        return Prediction(
            batch=batch,
            nodes=nodes,
            context=context,
            step=self.costs.decode(batch, nodes, context),
            accepted=float(self.accepted[nodes]),
            num_devices=self.num_devices,
        )


def best(predict: Predictor, batch: int, context: float, budgets: Sequence[int]) -> Prediction:
    """The most tokens per second; the smallest of equal budgets. 0 among `budgets` lets speculation be off."""
    return max((predict(batch, nodes, context) for nodes in sorted(budgets)), key=lambda p: p.tokens_per_second)


def schedule(predict: Predictor, max_batch: int, context: float, budgets: Sequence[int]) -> list[int]:
    """[max_batch + 1] the best budget by batch; of an empty one it is 0."""
    return [0, *(best(predict, batch, context, budgets).nodes for batch in range(1, max_batch + 1))]
