"""Arguments become a configuration: the boundaries of what is accepted."""

from __future__ import annotations

import pytest

from cluster.convert import engine_config
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from workers.config import EngineConfig


def config(draft_len: int | None = None, **fields: object) -> EngineConfig:
    speculative = {"model": "bundled:eagle3", "max_model_len": draft_len}
    return engine_config(EngineArgs.load({"device": "cpu", "speculative_config": speculative, **fields}))


@pytest.mark.parametrize("draft_len", [None, 256])
def test_a_drafter_may_be_limited_to_the_length_of_the_model(draft_len: int | None) -> None:
    assert config(draft_len, max_model_len=256).max_model_len == 256


def test_a_drafter_that_stops_before_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config.max_model_len: .* stops at 255 of max_model_len=256"):
        config(255, max_model_len=256)
