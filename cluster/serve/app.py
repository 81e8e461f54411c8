"""The Serve application: `build` turns a Serve configuration into a deployment with its placement group.

Serve configurations name it as `import_path: cluster.app:build`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY

from cluster.convert import placement_config, resolve_devices
from cluster.http.admission import PENDING_PER_PLACE
from cluster.pairs import settled_if_here
from cluster.serve.controller import APP_NAME
from cluster.serve.nodes import may_grow, nodes_of_cluster
from cluster.serve.placement import REPLICA_CPUS, gpus_for, group_bundles, missing_resources, placement_problem
from cluster.serve.replica import Replica
from cluster.serve.routing import router_config
from secateur.config import AppArgs, EngineArgs
from secateur.errors import ConfigError
from workers.models.draft_methods import METHODS

__all__ = ["APP_NAME", "build"]

logger = logging.getLogger(__name__)

TARGET_SHARE = 0.6
"""Autoscaling aims at this share of an engine's max_num_seqs: starting another engine takes minutes."""
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 1, 5
"""Serve notices a dead replica at the next check, and one that hangs after three that were not answered in time."""
SERVE_HEADROOM = 1024
"""Requests that Serve lets through beyond those that the server takes, which refuses them at once. Serve itself would
let them wait, and ask again every half second. Answers that their clients have not yet read count, too."""


def build(args: AppArgs | Mapping[str, Any]) -> ray_serve.Application:
    """Build the Serve application of one model. Raises ConfigError.

    Serve accepts builders of one parameter alone. This one validates the arguments itself: Serve converts a config
    file's dict only if the annotation is a class at run time.
    """
    return application_of(args)


def application_of(
    args: AppArgs | Mapping[str, Any], *, read: Mapping[str, str] | None = None
) -> ray_serve.Application:
    """Return the Serve application of one model; for `read` see `Replica`. Raises ConfigError."""
    app = args if isinstance(args, AppArgs) else AppArgs.load(args)
    engine_args = app.engine_args() if read else settled_if_here(app.engine_args())
    if engine_args.device == "auto":  # by the cluster's GPUs: the node that runs `build` is often a head without one
        has_gpus = app.accelerator_type or (ray.is_initialized() and ray.cluster_resources().get("GPU"))
        engine_args = engine_args.model_copy(update={"device": "cuda" if has_gpus else "cpu"})
    group, nodes = app.placement_group_config, nodes_of_cluster()
    on_one = group.strategy == "STRICT_PACK"
    num_gpus = gpus_for(nodes, on_one=on_one, accelerator_type=app.accelerator_type)
    if group.bundles is None:  # given bundles already say where the drafter runs
        engine_args = _colocated_where_needed(engine_args, num_gpus, on_one)
    engine_args = resolve_devices(engine_args, num_gpus=None)
    config = placement_config(engine_args)
    options: dict[str, Any] = {
        "name": APP_NAME,
        "max_ongoing_requests": PENDING_PER_PLACE * config.max_num_seqs + SERVE_HEADROOM,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        **_routing(config.max_num_seqs),
        **app.deployment_config,
        **_autoscaling(app.deployment_config, config.max_num_seqs),
    }
    actor_options = {"num_cpus": REPLICA_CPUS, "num_gpus": 0, **options.pop("ray_actor_options", {})}
    if actor_options["num_gpus"]:
        raise ConfigError("deployment_config.ray_actor_options.num_gpus: the replica itself uses no GPU; remove it")
    if not on_one:
        _warn_of_other_nodes(engine_args)
    bundles = group_bundles(
        config,
        per_worker=group.bundle_per_worker,
        given=group.bundles,
        replica_cpus=actor_options["num_cpus"],
        accelerator_type=app.accelerator_type,
    )
    need = sum(bundle.get("GPU", 0) for bundle in bundles)
    # Only a warning, because nodes may still join.
    if nodes and need > 0 and (num_gpus == 0 or (not on_one and need > num_gpus)):
        kind = f"{app.accelerator_type} GPUs" if app.accelerator_type else "GPUs"
        logger.warning("a replica needs %g %s, the cluster has %g: it waits until there are more", need, kind, num_gpus)
    if on_one and (short := missing_resources(bundles, nodes)):
        reason = placement_problem(bundles, nodes, short, config)
        if group.bundles is None and not may_grow():
            raise ConfigError(reason)
        logger.warning("%s. It waits for such a node", reason)
    deployment = ray_serve.deployment(
        **options,
        ray_actor_options=actor_options,
        placement_group_strategy=group.strategy,
        placement_group_bundles=bundles,
    )
    return deployment(ray_serve.ingress()(Replica)).bind(engine_args.model_dump(exclude_unset=True), read)


def _colocated_where_needed(args: EngineArgs, num_gpus: int, on_one: bool) -> EngineArgs:
    """Colocate the drafter with the verifier if there are too few GPUs for a dedicated one and no placement is set."""
    spec, size = args.speculative_config, args.tensor_parallel_size
    if args.device != "cuda" or spec is None or spec.draft_placement is not None or not METHODS[spec.method].is_model:
        return args
    both = size + spec.draft_tensor_parallel_size
    if not size <= num_gpus < both:
        return args
    logger.warning(
        "draft_placement: colocated, since %s has %d GPUs: with devices of its own for the drafter an engine takes %d",
        "the largest node" if on_one else "the cluster",
        num_gpus,
        both,
    )
    return args.model_copy(update={"speculative_config": spec.model_copy(update={"draft_placement": "colocated"})})


def _warn_of_other_nodes(args: EngineArgs) -> None:
    """Warn that a model's download folder may not exist on other nodes; the replica resolves names for all ranks."""
    drafter = args.speculative_config.model if args.speculative_config else None
    names = [name for name in (args.model, drafter) if name and not name.startswith(("/", "bundled:"))]
    if names:
        logger.warning(
            "strategy PACK may place ranks on several nodes, and all look for %s where the replica's node has it: "
            "write the absolute path of a folder that every node sees",
            " and ".join(names),
        )


def _routing(max_num_seqs: int) -> dict[str, Any]:
    """Return the option that names our router. Serve's HAProxy goes past it, and then Serve refuses the option."""
    return {} if RAY_SERVE_ENABLE_HA_PROXY else {"request_router_config": router_config(max(1, max_num_seqs // 4))}


def _autoscaling(options: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """Return the autoscaling options with a target that suits a batching engine.

    Serve's default target is 2 requests per replica: the third request would start another engine.
    """
    given = options.get("autoscaling_config")
    if not given and options.get("num_replicas") != "auto":
        return {}
    target = max(1, round(TARGET_SHARE * max_num_seqs))
    return {"autoscaling_config": {"target_ongoing_requests": target, **dict(given or {})}}
