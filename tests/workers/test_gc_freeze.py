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


def test_only_objects_created_after_the_freeze_are_collected() -> None:
    early = Node()
    freeze_start_up()
    late = Node()
    looked_at = {id(one) for one in gc.get_objects()}
    assert id(early) not in looked_at and id(late) in looked_at


def test_start_up_garbage_is_freed_by_the_freeze_and_later_garbage_as_usual() -> None:
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
