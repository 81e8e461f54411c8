"""Serve's request router for the replicas of one model: a session stays where its prefix is cached.

A session is a request's `x-session-id` header; `cluster.serve.sessions` sets it where clients do not. Each session
prefers the replicas in an order of its own (rendezvous hashing: all proxies agree on it, and a replica that joins or
leaves moves no session between others). A preferred replica with too much to do is passed over (as in "Consistent
Hashing with Bounded Loads", Mirrokni et al. 2018), so a prefix that everybody sends spreads over the replicas.

Serve sends this module to its proxies by value, so it must not import others of ours.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

LOAD_FACTOR = 1.25
"""A preferred replica may have this many times the mean number of running requests, and `slack` more."""
NUM_TRIES = 3
"""How often a replica is asked before the next one is. A busy node may miss Serve's first deadlines, of 0.1 s."""
REPLICA_PREFIX = "replica:"
"""A session of this form names a replica: the one that has stored what the request refers to."""


def preferred_order(session: str, num_running: Mapping[str, int], slack: int) -> list[str]:
    """Return the replicas in the order in which a session's request tries them.

    num_running: requests by replica id; slack: requests beyond LOAD_FACTOR times the mean that a preferred replica may
    have. Those that are passed over come last, the least busy first.
    """
    if session.startswith(REPLICA_PREFIX) and (named := session.removeprefix(REPLICA_PREFIX)) in num_running:
        return [named, *sorted(num_running.keys() - {named})]
    bound = LOAD_FACTOR * sum(num_running.values()) / len(num_running) + slack

    def rank(replica: str) -> tuple[int, bytes]:
        num_beyond = max(0, num_running[replica] - int(bound))
        return num_beyond, blake2b(f"{session}\n{replica}".encode(), digest_size=8).digest()

    return sorted(num_running, key=rank)


class SessionRouter(RequestRouter):
    """Routes a session's requests to its preferred replica, others to the less busy one of two."""

    def initialize_state(self, *, slack: int) -> None:
        """Take the options of the deployment's `request_router_kwargs`."""
        self._slack = slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas; Serve takes the less busy of the first group that has room."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # each call returns all replicas
        session = pending_request.metadata.session_id
        if not session:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas))), candidate_replicas]
        by_id: dict[str, RunningReplica] = {each.replica_id.unique_id: each for each in candidate_replicas}
        num_running = {id: self.replica_queue_len_cache.get(each.replica_id) or 0 for id, each in by_id.items()}
        first, *others = preferred_order(session, num_running, self._slack)
        return [[by_id[id]] for id in [first] * NUM_TRIES + others]


def router_config(slack: int) -> dict[str, Any]:
    """Return the `request_router_config` of a deployment; `slack` as in `preferred_order`."""
    return {"request_router_class": f"{__name__}.{SessionRouter.__name__}", "request_router_kwargs": {"slack": slack}}
