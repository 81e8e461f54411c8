"""The nodes of the connected Ray cluster: what they have, and whether others may come."""

from __future__ import annotations

from typing import Any

import ray
from ray.autoscaler.v2.utils import is_autoscaler_v2

from cluster.serve.placement import Resources


def nodes_of_cluster() -> list[Resources]:
    """What every node has, and those that an autoscaler says it may start; none without a connection."""
    if not ray.is_initialized():
        return []
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return alive + [dict(group.resources) for group in _node_groups()]


def may_grow() -> bool:
    """Whether an autoscaler may start nodes that are larger than those there are.

    Ray's own switch for it: KubeRay sets it with `enableInTreeAutoscaling`. Ray's first autoscaler, which that one
    replaced, leaves no such trace.
    """
    return bool(_node_groups()) or is_autoscaler_v2(fetch_from_server=True)


def _node_groups() -> list[Any]:
    """Those of an autoscaler that has told Ray what it may start. Ray's private way, by which Ray Data asks, too."""
    config = ray._private.state.state.get_cluster_config()
    return [group for group in config.node_group_configs if group.max_count] if config else []
