"""`python -m cluster.serve.drain --limit SECONDS` waits until this node's replica is idle. Run it before `ray stop`.

Serve drains a replica that it replaces itself. It does not drain one whose node is stopped, such as a pod that
Kubernetes deletes: `ray stop` cuts off every answer.
"""

from __future__ import annotations

import argparse
import time

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from cluster.observe.engine_metrics import PREFIX

BUSY = f"{PREFIX}client_requests_running"
"""Batch jobs are not among them: other replicas, or the next one, go on with those."""
SETTLE_S = 5.0
"""Requests still arrive for this long: Kubernetes removes the pod from its service while the hook runs."""
PERIOD_S = 1.0


def is_busy(url: str) -> bool:
    """Return whether the replica behind `url` has requests.

    A scrape reaches one replica. Serve's proxy prefers the one on its own node, so a node should hold only one. A
    refused connection means idle, a timeout means busy.
    """
    try:
        # Ignore HTTP_PROXY and the like; and the certificate, which need not name this machine's own address.
        response = httpx2.get(url, timeout=10, trust_env=False, verify=False)
    except httpx2.ConnectError:
        return False
    except httpx2.HTTPError:
        return True
    if response.is_error:  # Serve's proxy has no replica
        return False
    families = text_string_to_metric_families(response.text)
    return any(sample.value for family in families if family.name == BUSY for sample in family.samples)


def drain(url: str, limit_s: float) -> None:
    """Wait until the replica is idle, at most `limit_s` seconds."""
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
