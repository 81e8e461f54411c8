"""Tables of test cases of which `make test` runs a part, in which any two values still meet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def pairs(*factors: Iterable[Any], every: int = 2) -> list[Any]:
    """Return all combinations, for `pytest.mark.parametrize`; without `--full` one in `every` runs.

    Of three factors or more, any two values of two of them meet, if a third one has `every` values. Of two factors,
    each value comes with some of the other's.
    """
    cells = product(*(list(enumerate(factor)) for factor in factors))
    return [
        pytest.param(
            *(value for _, value in cell),
            marks=[pytest.mark.full] if sum(place for place, _ in cell) % every else [],
            id="-".join(str(value) for _, value in cell),
        )
        for cell in cells
    ]
