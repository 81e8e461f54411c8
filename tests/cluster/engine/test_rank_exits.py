"""The root cause among several exited ranks."""

from __future__ import annotations

import threading

from cluster.engine.rank_exits import ExitKind, RankExit, root_cause

KILLED = RankExit(ExitKind.KILLED, "verifier 1 died")
FAILED = RankExit(ExitKind.FAILED, "verifier 1 failed")
LOST = RankExit(ExitKind.LOST_A_PEER, "verifier 0 lost verifier 1")


async def test_a_killed_rank_is_the_cause_although_its_peers_exit_earlier() -> None:
    ended = [LOST]
    threading.Timer(0.2, lambda: ended.append(KILLED)).start()
    assert await root_cause(lambda: ended, wait_s=20.0) == KILLED


async def test_a_failed_rank_is_the_cause_rather_than_its_peers() -> None:
    assert await root_cause(lambda: [LOST, FAILED], wait_s=0.1) == FAILED


async def test_a_lost_peer_is_the_cause_if_no_other_rank_exits() -> None:
    assert await root_cause(lambda: [LOST], wait_s=0.1) == LOST


async def test_of_several_equal_exits_the_first_rank_is_the_cause() -> None:
    other = RankExit(ExitKind.KILLED, "drafter 0 died")
    assert await root_cause(lambda: [KILLED, other], wait_s=20.0) == KILLED
