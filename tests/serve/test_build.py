"""The Serve builder: checks and shapes, without starting Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve

from cluster.app import build
from cluster.ingress import PENDING_PER_SEQUENCE
from secateur.config import AppArgs, EngineArgs
from secateur.errors import ConfigError


def deployment(args: Any) -> Any:
    application = build(args)
    assert isinstance(application, serve.Application)
    return application._bound_deployment


def options(args: Any) -> Any:
    return deployment(args)._replica_config


def test_a_replica_is_a_cpu_only_driver_in_its_own_group() -> None:
    kwargs = {"tensor_parallel_size": 2, "device": "cuda"}
    spec = {"method": "draft_model", "model": "bundled:draft", "draft_tensor_parallel_size": 1}
    replica = options({"engine_kwargs": {**kwargs, "speculative_config": spec}})
    assert replica.ray_actor_options["num_gpus"] == 0
    assert len(replica.placement_group_bundles) == 3
    assert all(bundle["GPU"] == 1 for bundle in replica.placement_group_bundles)
    assert replica.placement_group_strategy == "STRICT_PACK"
    assert replica.placement_group_bundles[0]["CPU"] >= replica.ray_actor_options["num_cpus"]


def test_serve_lets_through_more_than_the_ingress_admits() -> None:
    found = deployment({"engine_kwargs": {"max_num_seqs": 4}})
    assert found.max_ongoing_requests > PENDING_PER_SEQUENCE * 4


def test_deployment_options_are_handed_on() -> None:
    found = deployment({"deployment_config": {"num_replicas": 2, "graceful_shutdown_timeout_s": 77}})
    assert found.num_replicas == 2
    assert found._deployment_config.graceful_shutdown_timeout_s == 77


def test_a_bundle_per_worker_shapes_every_bundle() -> None:
    args = {"engine_kwargs": {"device": "cpu"}, "placement_group_config": {"bundle_per_worker": {"CPU": 1}}}
    assert [bundle["CPU"] for bundle in options(args).placement_group_bundles] == [1.1, 1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"engine_kwarg": {}}, "did you mean 'engine_kwargs'"),
        ({"engine_kwargs": {"speculative_config": {"method": "ngram", "model": "x"}}}, "takes no model"),
        ({"deployment_config": {"ray_actor_options": {"num_gpus": 1}}}, "uses no GPU"),
        ({"placement_group_config": {"bundles": [{"CPU": 1}]}}, "needs 2"),
    ],
)
def test_wrong_arguments_are_refused_by_the_builder(args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(args)


def test_engine_arguments_survive_the_way_to_the_replica() -> None:
    given = EngineArgs.load({"tensor_parallel_size": 2, "max_num_seqs": 3, "seed": 5, "device": "cpu"})
    [args] = deployment(AppArgs.from_engine_args(given)).init_args
    assert EngineArgs.load(args).model_dump(exclude={"served_model_name"}) == given.model_dump(
        exclude={"served_model_name"}
    )
