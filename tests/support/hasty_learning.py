"""Imported in the process that ranks are forked from: their drafter takes over what it learnt as often as it can."""

from __future__ import annotations

import math

from drafter.learning import learner, reservoir

reservoir.WINDOW, reservoir.CONTEXT, reservoir.FEWEST = 12, 4, 4
learner.FEWEST_WINDOWS, learner.BATCH_WINDOWS, learner.CANARY_WINDOWS = 1, 1, 2
learner.FEWEST_HELD = 1000  # no tenant refuses a head
learner.SURE, learner.QUIET_S, learner.LEARNING_RATE = -math.inf, 0.0, 3e-3
