"""The placement group of one replica: its Ray bundles, and whether the cluster has room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.engine.rank_placement import num_bundles
from secateur.errors import ConfigError, Problem
from workers.config import EngineConfig

REPLICA_CPUS = 0.1
CPU_WORKER_CPUS = 0.1
"""Logical CPUs that a process requests from Ray by default.

They are small because Ray counts CPUs but does not enforce them, and a replica, a proxy, two verifier ranks and a
drafter must fit on a laptop with two cores.
"""

Bundle = dict[str, float]
Resources = Mapping[str, float]
"""Resources of one node by Ray's names."""


def group_bundles(
    config: EngineConfig,
    *,
    per_worker: Mapping[str, float] | None = None,
    given: Sequence[Mapping[str, float]] | None = None,
    replica_cpus: float = REPLICA_CPUS,
    accelerator_type: str | None = None,
) -> list[Bundle]:
    """Return one bundle per device; bundle 0 also holds the replica. Raises ConfigError for unsuitable bundles.

    `per_worker` replaces the resources of each bundle, and the replica's CPUs are added to the first. `given` replaces
    the whole list.
    """
    count = num_bundles(config)
    if given is not None:
        bundles = [dict(bundle) for bundle in given]
        if len(bundles) != count:
            raise _wrong("bundles", f"has {len(bundles)} bundles, the engine needs {count}: one per device")
        if bundles[0].get("CPU", 0) < replica_cpus:
            raise _wrong("bundles", f"the first one also holds the replica and needs at least CPU: {replica_cpus}")
    else:
        default = {"GPU": 1.0, "CPU": 1.0} if config.device == "cuda" else {"CPU": CPU_WORKER_CPUS}
        bundles = [dict(per_worker or default) for _ in range(count)]
        bundles[0]["CPU"] = round(bundles[0].get("CPU", 0.0) + replica_cpus, 4)
    if config.device == "cuda" and any(bundle.get("GPU", 0) < 1 for bundle in bundles):
        field = "bundle_per_worker" if given is None else "bundles"
        raise _wrong(field, "every bundle needs GPU: 1 with device 'cuda'")
    if accelerator_type is not None and config.device == "cuda":
        for bundle in bundles:
            bundle.setdefault(f"accelerator_type:{accelerator_type}", 0.001)
    return bundles


def gpus_for(nodes: Sequence[Resources], *, on_one: bool, accelerator_type: str | None = None) -> int:
    """Return how many GPUs one engine can have: those of the largest node if `on_one`, else of all nodes together."""
    fitting = [node for node in nodes if accelerator_type is None or f"accelerator_type:{accelerator_type}" in node]
    counts = [int(node.get("GPU", 0)) for node in fitting]
    return (max if on_one else sum)(counts or [0])


def missing_resources(bundles: Sequence[Bundle], nodes: Sequence[Resources]) -> list[str]:
    """Return the resources of which no node has enough for all bundles; [] if one node can hold them.

    The result is also [] if no node has any of a resource, such as GPUs while only the head is up: nodes are still
    joining then, and nothing is certain.
    """
    need = {name: round(sum(bundle.get(name, 0) for bundle in bundles), 4) for bundle in bundles for name in bundle}
    need = {name: amount for name, amount in need.items() if amount > 0}
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in need}
    if not all(most.values()) or any(all(node.get(name, 0) >= need[name] for name in need) for node in nodes):
        return []
    # Each resource may suffice on some node, but not all on the same one. Then all are named.
    return [name for name in need if most[name] < need[name]] or list(need)


def placement_problem(
    bundles: Sequence[Bundle], nodes: Sequence[Resources], short: Sequence[str], config: EngineConfig
) -> str:
    """Say why no node can hold an engine and what to write instead; `short` comes from `missing_resources`."""
    counts = [
        (name, sum(bundle.get(name, 0) for bundle in bundles), max(node.get(name, 0) for node in nodes))
        for name in short
    ]
    need, most = (", ".join(f"{name}: {count[which]:g}" for name, *count in counts) for which in (0, 1))
    gpus, on_cuda = max(node.get("GPU", 0) for node in nodes), config.device == "cuda"
    instead = []
    if config.draft is not None and config.draft.placement == "dedicated" and config.tensor_parallel_size <= gpus:
        instead.append("draft_placement: colocated")
    if "GPU" in short or not on_cuda:
        instead.append("a smaller tensor_parallel_size")
    if "CPU" in short:
        shape = "{GPU: 1, CPU: 0.1}" if on_cuda else "{CPU: 0.01}"
        instead.append(f"placement_group_config.bundle_per_worker: {shape}")
    instead.append("placement_group_config.strategy: PACK for an engine across nodes")
    return (
        f"an engine's {len(bundles)} bundles need {need} on one node, of which no node has more than {most}: "
        f"write {', or '.join(instead)}; if larger nodes are still to join, write placement_group_config.bundles out"
    )


def _wrong(field: str, message: str) -> ConfigError:
    return ConfigError(Problem(f"placement_group_config.{field}", message))
