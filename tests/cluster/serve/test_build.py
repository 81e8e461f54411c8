"""The Serve builder: validation and placement, without starting Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

import cluster.serve.app
import cluster.serve.launch
import cluster.serve.nodes
from cluster.http.admission import PENDING_PER_PLACE
from cluster.serve.app import build
from secateur.config import AppArgs, EngineArgs
from secateur.errors import ConfigError


def deployment(args: Any) -> Any:
    """Return the deployment as Serve builds it: it refuses builders of another shape."""
    application = call_user_app_builder_with_args_if_necessary(build, args) if isinstance(args, dict) else build(args)
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


def test_serve_admits_more_than_the_ingress() -> None:
    found = deployment({"engine_kwargs": {"max_num_seqs": 4}})
    assert found.max_ongoing_requests > PENDING_PER_PLACE * 4


def test_deployment_options_are_passed_on() -> None:
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
def test_autoscaling_targets_most_of_the_engines_seats(options: dict[str, Any], target: float) -> None:
    found = deployment({"engine_kwargs": {"max_num_seqs": 50}, "deployment_config": options})._deployment_config
    assert found.autoscaling_config.target_ongoing_requests == target
    assert found.autoscaling_config.max_replicas == options.get("autoscaling_config", {}).get("max_replicas", 100)


def test_serves_haproxy_goes_past_our_router_and_speaks_no_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.serve.launch, "RAY_SERVE_ENABLE_HA_PROXY", True)
    for has_haproxy in (True, False):
        monkeypatch.setattr(cluster.serve.app, "RAY_SERVE_ENABLE_HA_PROXY", has_haproxy)
        assert bool(cluster.serve.app._routing(8)) != has_haproxy
    with pytest.raises(ConfigError, match="speaks no HTTPS; unset RAY_SERVE_ENABLE_HA_PROXY"):
        cluster.serve.launch._tls(EngineArgs.load({"ssl_certfile": "c", "ssl_keyfile": "k"}))


def test_autoscaling_is_off_by_default() -> None:
    assert deployment({})._deployment_config.autoscaling_config is None


@pytest.mark.parametrize(
    ("strategy", "model", "warns"),
    [("PACK", "org/llama", True), ("PACK", "/models/llama", False), ("STRICT_PACK", "org/llama", False)],
)
def test_ranks_on_several_nodes_need_a_shared_folder(
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


def test_a_speculator_as_the_model_is_placed_with_its_target(tmp_path: Path) -> None:
    verifier = {"name_or_path": "/models/target"}
    config = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": verifier}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loading = {"model_source": str(tmp_path), "model_id": "pair"}
    found = deployment({"model_loading_config": loading, "engine_kwargs": {"device": "cuda"}})
    assert len(found._replica_config.placement_group_bundles) == 2
    args = EngineArgs.load(found.init_args[0])
    assert (args.model, args.model_ids) == ("/models/target", ("pair",))
    assert args.speculative_config is not None and args.speculative_config.method == "eagle3"


def test_engine_arguments_reach_the_replica_unchanged() -> None:
    given = EngineArgs.load({"tensor_parallel_size": 2, "max_num_seqs": 3, "seed": 5, "device": "cpu"})
    args, _ = deployment(AppArgs.from_engine_args(given)).init_args
    assert EngineArgs.load(args).model_dump(exclude={"served_model_name"}) == given.model_dump(
        exclude={"served_model_name"}
    )


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make Ray report these nodes, by their resources, and whether an autoscaler may start others."""

    def say(resources: list[dict[str, float]], grows: bool = False) -> None:
        total = {"GPU": sum(node.get("GPU", 0) for node in resources)}
        monkeypatch.setattr(cluster.serve.app.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(cluster.serve.app.ray, "cluster_resources", lambda: {k: v for k, v in total.items() if v})
        alive = [{"Resources": node, "Alive": True} for node in resources]
        lost = [{"Resources": {"CPU": 999, "GPU": 99}, "Alive": False}]
        monkeypatch.setattr(cluster.serve.app.ray, "nodes", lambda: alive + lost)
        monkeypatch.setattr(cluster.serve.app.ray._private.state.state, "get_cluster_config", lambda: None)
        monkeypatch.setattr(cluster.serve.nodes, "is_autoscaler_v2", lambda fetch_from_server: grows)

    return say


@pytest.fixture
def on_cluster(monkeypatch: pytest.MonkeyPatch, nodes: Callable[..., None]) -> Callable[..., Any]:
    """Return the deployment of `secateur serve` on a cluster with this number of GPUs. Ray is replaced."""

    def run(gpus: int, **fields: Any) -> Any:
        nodes([{"CPU": 8, "GPU": gpus} if gpus else {"CPU": 8}])
        given: list[Any] = []

        def leave() -> None:
            raise KeyboardInterrupt

        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        monkeypatch.setattr(
            cluster.serve.launch, "visible_gpus", lambda: pytest.fail("this machine's devices do not matter")
        )
        monkeypatch.setattr(cluster.serve.launch, "ray_cluster", lambda *_: nullcontext())
        monkeypatch.setattr(cluster.serve.launch, "get_controller", lambda: None)
        monkeypatch.setattr(cluster.serve.launch.ray_serve, "start", lambda **options: None)
        monkeypatch.setattr(
            cluster.serve.launch.ray_serve, "run", lambda application, **options: given.append(application)
        )
        monkeypatch.setattr(cluster.serve.launch, "_serve_address", lambda: None)
        monkeypatch.setattr(cluster.serve.launch, "delete_application", lambda *_: None)
        monkeypatch.setattr(cluster.serve.launch.signal, "pause", leave)
        cluster.serve.launch.serve(EngineArgs.load({"port": 0, **fields}))
        return given[0]._bound_deployment

    return run


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (4, "cuda")])
def test_auto_is_the_clusters_device(on_cluster: Callable[..., Any], gpus: int, device: str) -> None:
    found = on_cluster(gpus)
    assert found.init_args[0]["device"] == device
    assert [bundle.get("GPU", 0) for bundle in found._replica_config.placement_group_bundles] == 2 * [int(gpus > 0)]


def test_an_explicit_device_is_requested_from_the_cluster(
    on_cluster: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert on_cluster(4, device="cpu").init_args[0]["device"] == "cpu"
    assert "waits" not in caplog.text
    assert on_cluster(0, device="cuda").init_args[0]["device"] == "cuda"
    assert "needs 2 GPUs, the cluster has 0: it waits until there are more" in caplog.text


def test_an_impossible_engine_is_an_error_before_serve_starts(
    on_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.serve.launch, "_free_port", lambda host: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="triton needs device 'cuda'"):
        on_cluster(0, kernels="triton")


def test_running_answers_have_the_shutdown_timeout(on_cluster: Callable[..., Any]) -> None:
    found = on_cluster(0, shutdown_timeout=77)
    assert found._deployment_config.graceful_shutdown_timeout_s == 77
    assert "shutdown_timeout" not in found.init_args[0]


# -- an engine on one node -------------------------------------------------------------------------------------------

EIGHT = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0}
HEAD = {"CPU": 4.0}


def engine(size: int, **spec: Any) -> dict[str, Any]:
    drafter = {"method": "draft_model", "model": "bundled:draft", **spec}
    return {"engine_kwargs": {"tensor_parallel_size": size, "device": "cuda", "speculative_config": drafter}}


def num_bundles(args: Any) -> int:
    return len(options(args).placement_group_bundles)


def test_a_drafter_without_room_on_the_largest_node_is_colocated(
    nodes: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    nodes([HEAD, EIGHT, EIGHT])  # 16 GPUs, but no 9 on one node
    found = deployment(engine(8))
    assert len(found._replica_config.placement_group_bundles) == 8
    assert found.init_args[0]["speculative_config"]["draft_placement"] == "colocated"
    assert "draft_placement: colocated, since the largest node has 8 GPUs" in caplog.text


def test_a_drafter_keeps_its_own_device_if_there_is_room(
    nodes: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    nodes([HEAD, EIGHT])
    assert num_bundles(engine(7)) == 8
    assert num_bundles(engine(8, method="ngram", model=None)) == 8
    assert caplog.text == ""
    nodes([HEAD, EIGHT, EIGHT])
    assert num_bundles({**engine(8), "placement_group_config": {"strategy": "PACK"}}) == 9
    assert "waits" not in caplog.text


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (engine(16), "need GPU: 17 on one node, .* more than GPU: 8: write a smaller tensor_par"),
        (engine(8, draft_placement="dedicated"), "need GPU: 9 on one node.*write draft_placement: colocated, or a sm"),
        ({"engine_kwargs": {"tensor_parallel_size": 9, "device": "cuda", "no_speculation": True}}, "need GPU: 9 on"),
        ({**engine(4), "placement_group_config": {"bundle_per_worker": {"GPU": 1, "CPU": 20}}}, "need CPU: 100.1 on"),
    ],
)
def test_an_engine_larger_than_every_node_is_an_error_with_advice(
    nodes: Callable[..., None], args: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes([HEAD, EIGHT, EIGHT, EIGHT])
    with pytest.raises(ConfigError, match=told):
        build(args)
    nodes([HEAD, EIGHT], grows=True)
    build(args)
    assert "It waits for such a node" in caplog.text


def test_explicit_bundles_are_waited_for(nodes: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    nodes([HEAD, EIGHT])
    bundles = [{"GPU": 1.0, "CPU": 1.0}] * 9
    assert num_bundles({**engine(8), "placement_group_config": {"bundles": bundles}}) == 9
    assert "It waits for such a node" in caplog.text


def test_nodes_that_have_not_joined_yet_are_waited_for(
    nodes: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    nodes([HEAD])
    assert num_bundles({**engine(8), "accelerator_type": "H100"}) == 9
    assert "a replica needs 9 H100 GPUs, the cluster has 0: it waits until there are more" in caplog.text
    nodes([HEAD, EIGHT])
    assert num_bundles({**engine(1), "accelerator_type": "H200"}) == 2
    assert "a replica needs 2 H200 GPUs, the cluster has 0" in caplog.text


def test_resources_that_no_single_node_has_together_are_refused(nodes: Callable[..., None]) -> None:
    nodes([{"CPU": 64.0}, {"CPU": 1.0, "GPU": 8.0}])
    with pytest.raises(ConfigError, match=r"need CPU: .*, GPU: |need GPU: .*, CPU: "):
        build(engine(1))
    nodes([{"CPU": 2.0}])
    with pytest.raises(ConfigError, match=r"need CPU: 3.2 on one node, .* more than CPU: 2: write a smaller tensor"):
        build({"engine_kwargs": {"device": "cpu", "tensor_parallel_size": 30}})
