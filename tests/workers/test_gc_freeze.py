"""Objects from start-up are excluded from garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from workers.gc_freeze import freeze_start_up


class Node:
    """An object in a reference cycle."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_the_collector_looks_at_nothing_made_before_and_at_all_made_after() -> None:
    early = Node()
    freeze_start_up()
    late = Node()
    looked_at = {id(one) for one in gc.get_objects()}
    assert id(early) not in looked_at and id(late) in looked_at


def test_garbage_of_start_up_is_freed_first_and_later_garbage_as_ever() -> None:
    gc.disable()
    try:
        early = weakref.ref(Node())
        assert early() is not None
        freeze_start_up()
        late = weakref.ref(Node())
        assert early() is None and late() is not None
        gc.collect()
        assert late() is None
    finally:
        gc.enable()
