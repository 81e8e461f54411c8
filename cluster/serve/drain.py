"""`python -m cluster.serve.drain --limit SECONDS` waits until no request is left here; for a hook before `ray stop`.

Serve drains a replica that Serve replaces. It does not drain one whose node is stopped, as a pod is that Kubernetes
deletes: `ray stop` ends every answer in the middle.
"""

from __future__ import annotations

import argparse
import time

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from cluster.http.metrics import PREFIX

BUSY = {f"{PREFIX}num_requests_running", f"{PREFIX}num_requests_waiting"}
SETTLE_S = 5.0
"""Kubernetes takes a pod out of its service while the hook runs: until everybody has heard, requests still come."""
PERIOD_S = 1.0


def is_busy(url: str) -> bool:
    """Whether the replica behind `url` holds requests. A scrape reaches one replica: Serve's proxy prefers that of its
    own node, so a node should hold one. Nothing that answers holds no requests; what is too busy to answer does.
    """
    try:
        response = httpx2.get(url, timeout=10, trust_env=False)  # a proxy of the environment is for other machines
    except httpx2.ConnectError:
        return False
    except httpx2.HTTPError:
        return True
    if response.is_error:  # Serve's proxy knows no replica
        return False
    families = text_string_to_metric_families(response.text)
    return any(sample.value for family in families if family.name in BUSY for sample in family.samples)


def drain(url: str, limit_s: float) -> None:
    """Returns when nothing is left to answer, at the latest after the limit."""
    deadline = time.monotonic() + limit_s
    time.sleep(min(SETTLE_S, limit_s))
    while is_busy(url) and time.monotonic() < deadline:
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Waits until the replica of this node has answered its requests.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/metrics", help="the replica's metrics")
    parser.add_argument("--limit", type=float, required=True, help="seconds after which it waits no longer")
    args = parser.parse_args()
    drain(args.url, args.limit)
