"""The Serve builder: checks and shapes, without starting Ray."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from ray import serve

import cluster.app
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


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({"num_replicas": "auto"}, 30),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 8}}, 30),
        ({"num_replicas": "auto", "autoscaling_config": {"target_ongoing_requests": 7}}, 7),
    ],
)
def test_autoscaling_aims_at_most_of_the_engine_s_places(options: dict[str, Any], target: float) -> None:
    found = deployment({"engine_kwargs": {"max_num_seqs": 50}, "deployment_config": options})._deployment_config
    assert found.autoscaling_config.target_ongoing_requests == target
    assert found.autoscaling_config.max_replicas == options.get("autoscaling_config", {}).get("max_replicas", 100)


def test_nothing_scales_by_itself_unless_asked() -> None:
    assert deployment({})._deployment_config.autoscaling_config is None


@pytest.mark.parametrize(
    ("strategy", "model", "warns"),
    [("PACK", "org/llama", True), ("PACK", "/models/llama", False), ("STRICT_PACK", "org/llama", False)],
)
def test_ranks_on_several_nodes_need_a_folder_that_all_see(
    caplog: pytest.LogCaptureFixture, strategy: str, model: str, warns: bool
) -> None:
    loading, engine = {"model_source": model}, {"device": "cpu", "no_speculation": True}
    given = {"model_loading_config": loading, "engine_kwargs": engine}
    build({**given, "placement_group_config": {"strategy": strategy}})
    assert ("all look for org/llama where the replica's node has it" in caplog.text) is warns


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


@pytest.fixture
def on_cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`secateur serve` on a cluster that says it has so many GPUs: the deployment it is given. Ray does nothing."""

    def run(gpus: int, **fields: Any) -> Any:
        given: list[Any] = []

        def leave() -> None:
            raise KeyboardInterrupt

        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        monkeypatch.setattr(cluster.app, "visible_gpus", lambda: pytest.fail("this machine's devices do not matter"))
        monkeypatch.setattr(cluster.app, "_cluster", lambda *_: nullcontext())
        monkeypatch.setattr(cluster.app, "_controller", lambda: None)
        monkeypatch.setattr(cluster.app.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(cluster.app.ray, "cluster_resources", lambda: {"GPU": gpus} if gpus else {})
        monkeypatch.setattr(cluster.app.ray_serve, "start", lambda **options: None)
        monkeypatch.setattr(cluster.app.ray_serve, "run", lambda application, **options: given.append(application))
        monkeypatch.setattr(cluster.app, "_serve_address", lambda: None)
        monkeypatch.setattr(cluster.app, "_delete", lambda controller: None)
        monkeypatch.setattr(cluster.app.signal, "pause", leave)
        cluster.app.serve(EngineArgs.load({"port": 0, **fields}))
        return given[0]._bound_deployment

    return run


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (4, "cuda")])
def test_auto_is_the_cluster_s_device_and_not_this_machine_s(
    on_cluster: Callable[..., Any], gpus: int, device: str
) -> None:
    found = on_cluster(gpus)
    assert found.init_args[0]["device"] == device
    assert [bundle.get("GPU", 0) for bundle in found._replica_config.placement_group_bundles] == 2 * [int(gpus > 0)]


def test_the_device_asked_for_is_what_a_cluster_is_asked_for(
    on_cluster: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert on_cluster(4, device="cpu").init_args[0]["device"] == "cpu"
    assert "waits" not in caplog.text
    assert on_cluster(0, device="cuda").init_args[0]["device"] == "cuda"
    assert "needs 2 GPUs, the cluster has 0: it waits until there are more" in caplog.text


def test_what_no_cluster_could_serve_is_told_before_serve_starts(
    on_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.app, "_free_port", lambda host: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="triton needs device 'cuda'"):
        on_cluster(0, kernels="triton")
