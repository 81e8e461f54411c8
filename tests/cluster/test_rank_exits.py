"""Which of several ended ranks is blamed."""

from __future__ import annotations

import threading

from cluster.rank_exits import ExitKind, RankExit, root_cause

KILLED = RankExit(ExitKind.KILLED, "verifier 1 died")
FAILED = RankExit(ExitKind.FAILED, "verifier 1 failed")
LOST = RankExit(ExitKind.LOST_A_PEER, "verifier 0 lost verifier 1")


def test_who_was_killed_is_blamed_though_who_lost_it_is_heard_first() -> None:
    ended = [LOST]
    threading.Timer(0.2, lambda: ended.append(KILLED)).start()
    assert root_cause(lambda: ended, wait_s=20.0) == KILLED


def test_who_failed_by_itself_is_blamed_rather_than_who_lost_it() -> None:
    ended = [LOST]
    threading.Timer(0.1, lambda: ended.append(FAILED)).start()
    assert root_cause(lambda: ended, wait_s=1.0) == FAILED


def test_a_lost_peer_is_all_there_is_if_nobody_else_ends() -> None:
    assert root_cause(lambda: [LOST], wait_s=0.1) == LOST


def test_of_several_alike_the_first_rank_is_blamed() -> None:
    other = RankExit(ExitKind.KILLED, "drafter 0 died")
    assert root_cause(lambda: [KILLED, other], wait_s=20.0) == KILLED
