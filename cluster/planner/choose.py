"""How large trees should be at which batch: the budget of the highest predicted throughput."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.planner.predict import Prediction, Predictor


def best(predict: Predictor, batch: int, context: float, budgets: Sequence[int]) -> Prediction:
    """The most tokens per second; the smallest of equal budgets. 0 among `budgets` lets speculation be off."""
    return max((predict(batch, nodes, context) for nodes in sorted(budgets)), key=lambda p: p.tokens_per_second)


def schedule(predict: Predictor, max_batch: int, context: float, budgets: Sequence[int]) -> list[int]:
    """[max_batch + 1] the best budget by batch; of an empty one it is 0."""
    return [0, *(best(predict, batch, context, budgets).nodes for batch in range(1, max_batch + 1))]
