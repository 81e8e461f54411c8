"""The nodes of the connected Ray cluster: their resources, and whether an autoscaler may add others."""

from __future__ import annotations

from typing import Any

import ray
from ray.autoscaler.v2.utils import is_autoscaler_v2

from cluster.serve.placement import Resources


def nodes_of_cluster() -> list[Resources]:
    """Return the resources of every node, and of those an autoscaler may start; [] without a connection."""
    if not ray.is_initialized():
        return []
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return alive + [dict(group.resources) for group in _node_groups()]


def may_grow() -> bool:
    """Return whether an autoscaler may start larger nodes than the present ones.

    This asks for Ray's autoscaler v2, which KubeRay enables with `enableInTreeAutoscaling`. Autoscaler v1 cannot be
    detected.
    """
    return bool(_node_groups()) or is_autoscaler_v2(fetch_from_server=True)


def _node_groups() -> list[Any]:
    """Return the node groups an autoscaler has declared. Ray Data uses the same private function."""
    config = ray._private.state.state.get_cluster_config()
    return [group for group in config.node_group_configs if group.max_count] if config else []
