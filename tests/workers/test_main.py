"""The end of a rank's process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from workers.main import exit_on_sigterm


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The handler of this process, which each test replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_a_rank_with_success() -> None:
    with pytest.raises(SystemExit) as ended, exit_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 0


def test_sigterm_ends_a_rank_with_success_where_c_code_makes_another_error_of_it() -> None:
    has_raised = False
    with exit_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            has_raised = True
            raise ValueError("could not determine the shape of object type") from None
    assert has_raised


def test_an_error_without_sigterm_is_an_error() -> None:
    with pytest.raises(ValueError, match="no weights"), exit_on_sigterm():
        raise ValueError("no weights")
