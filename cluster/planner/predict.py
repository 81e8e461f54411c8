"""What a batch of decoding requests gets: step time, accepted length, tokens per second and per device."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planner.acceptance import Curve
from cluster.planner.costs import Costs, StepTime


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

    costs: Costs
    accepted: Curve
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
