"""The bundled EAGLE-3 head, for the tests of what learns and what is scored."""

from __future__ import annotations

import pytest

from drafter.proposers.eagle3 import Eagle3Head
from tests.support.engines import BUNDLED
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.readers import read_spec
from workers.models.specs import Eagle3Spec


@pytest.fixture(scope="module")
def spec() -> Eagle3Spec:
    return read_eagle3_spec(str(BUNDLED / "eagle3"), read_spec(str(BUNDLED / "target")))


@pytest.fixture(scope="module")
def serving(spec: Eagle3Spec) -> Eagle3Head:
    return Eagle3Head.load(spec, BUNDLED / "eagle3", BUNDLED / "target")
