"""The manifests as kubectl renders them, checked without a cluster: structure, arithmetic, Serve's schema, Kubernetes'
and our own.

KubeRay's own schema is checked too where SECATEUR_RAYSERVICE_SCHEMA names the OpenAPI schema of RayService v1 as JSON.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from secateur.config import AppArgs
from secateur.errors import ConfigError
from tests.support.manifests import (
    APPLIED,
    KUBERNETES,
    KUSTOMIZATIONS,
    MANIFESTS,
    OVERLAYS,
    RAY_POD,
    RAY_STOP_S,
    ROOT,
    SERVE_PORT,
    application,
    claims,
    containers,
    deployment,
    documents,
    engine_args,
    head,
    needs_kubectl,
    objects,
    pinned_ray,
    pod_specs,
    ports,
    quantity,
    ray_container,
    render,
    selects,
    serve_config,
    service_of,
    short,
    worker_group,
)

pytestmark = needs_kubectl

# Files


def test_the_readme_lists_every_overlay_and_component() -> None:
    text = (MANIFESTS / "README.md").read_text()
    folders = [*OVERLAYS, *(MANIFESTS / "components").iterdir()]
    assert len(folders) == 12
    assert all(f"`{short(folder)}`" in text for folder in folders)


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_every_object_names_its_kind(folder: Path) -> None:
    for document in render(folder):
        assert document["apiVersion"] and document["kind"] and document["metadata"]["name"]
        assert document["metadata"]["name"].startswith("secateur")


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=short)
def test_a_kustomization_uses_exactly_the_files_beside_it(folder: Path) -> None:
    [kustomization] = documents(folder / "kustomization.yaml")
    patches = [patch["path"] for patch in kustomization.get("patches", []) if "path" in patch]
    named = [*kustomization.get("resources", []), *kustomization.get("components", []), *patches]
    listed = {(folder / name).resolve() for name in named}
    assert {path for path in listed if path.is_file()} == set(folder.glob("*.yaml")) - {folder / "kustomization.yaml"}
    assert all((path / "kustomization.yaml").is_file() for path in listed if path.is_dir())


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_the_image_is_set_in_one_place(folder: Path) -> None:
    images = {container["image"] for d in render(folder) for spec in pod_specs(d) for container in containers(spec)}
    assert len({image for image in images if "secateur" in image}) <= 1
    assert not any(image.startswith("secateur:") for image in images), "no overlay names the registry"


# Names in documents and manifests

DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), MANIFESTS / "README.md"} - {ROOT / "CHANGELOG.md"})
CODE = ("secateur", "workers", "drafter", "verifier", "cluster", "training", "tests", "docs")
FOLDERS = ("manifests", *CODE, *(path.name for path in MANIFESTS.iterdir() if path.is_dir()))
CREATED = re.compile(r"kubectl create secret generic (\S+) --from-(?:file|literal)=([\w.-]+)=")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def references(value: Any) -> set[tuple[str, str, str]]:
    """Return (kind, name, key) of every secret and config map that an object refers to; key "" is all of them."""
    if isinstance(value, list):
        return {found for item in value for found in references(item)}
    if not isinstance(value, dict):
        return set()
    found = {found for item in value.values() for found in references(item)}
    for field in ("secretKeyRef", "configMapKeyRef"):
        if field in value:
            found.add((field.removesuffix("KeyRef"), value[field]["name"], value[field]["key"]))
    if "secret" in value and "secretName" in value["secret"]:
        found.add(("secret", value["secret"]["secretName"], ""))
    if "configMap" in value and "name" in value["configMap"]:
        found.add(("configMap", value["configMap"]["name"], ""))
    return found


def created_secrets() -> dict[str, str]:
    """Return the key of every secret that the README tells to create."""
    return dict(CREATED.findall((MANIFESTS / "README.md").read_text()))


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_every_secret_and_config_map_is_made_by_something(folder: Path) -> None:
    maps = {document["metadata"]["name"]: set(document["data"]) for document in objects(folder, "ConfigMap")}
    secrets = created_secrets()
    for kind, name, key in {found for document in render(folder) for found in references(document)}:
        if kind == "configMap":
            assert key in maps[name] | {""}
        else:
            assert name in secrets, f"no command of the README creates {name}"
            assert key in (secrets[name], "")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_document_creates_only_secrets_that_a_manifest_reads(path: Path) -> None:
    found = {found for folder in APPLIED for document in render(folder) for found in references(document)}
    secrets = created_secrets()
    for name, key in CREATED.findall(path.read_text()):
        assert secrets[name] == key
        assert ("secret", name, key) in found or ("secret", name, "") in found


def test_every_path_that_is_named_exists() -> None:
    """Paths from the root, from `manifests/`, or from the folder of the document; files of manifests by name alone."""
    word = r"[\w.-]+(?:/[\w.-]+)*"
    missing = []
    for path in [*DOCUMENTS, *MANIFESTS.rglob("*.yaml"), MANIFESTS / "Dockerfile"]:
        text = re.sub(r"^apiVersion: .*$", "", path.read_text(), flags=re.MULTILINE)
        spoken = set(re.findall(rf"(?<![\w/.:@-])((?:{'|'.join(FOLDERS)})/{word})", text))
        if path.is_relative_to(MANIFESTS) or path.name == "kubernetes.md":
            spoken |= set(re.findall(r"`([\w.-]+\.(?:yaml|md|py|json))`", text))
        for name in {name.rstrip(".") for name in spoken}:
            places = [ROOT, MANIFESTS, path.parent, *(ROOT / folder for folder in CODE)]
            if not any((place / name).exists() for place in places) and not any(MANIFESTS.rglob(name)):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


def test_every_name_in_the_guides_is_one_of_ours() -> None:
    named = {document["metadata"]["name"] for folder in APPLIED for document in render(folder)}
    services = {f"{service_of(overlay)['metadata']['name']}-serve-svc" for overlay in OVERLAYS}
    known = {path.name for path in OVERLAYS} | named | services | set(created_secrets()) | {"kubernetes-validate"}
    for path in (MANIFESTS / "README.md", ROOT / "docs/guides/kubernetes.md"):
        text = path.read_text()
        spans = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", text))
        assert spans <= known, f"{path.name} names {spans - known}"
        for kind, name in re.findall(r"\b(rayservice|service)[/ ](secateur[\w-]*)", text):
            assert name in (services if kind == "service" else named)
        for folder in re.findall(r"kubectl apply -k (\S+?)[`\s]", text):
            assert (ROOT / folder / "kustomization.yaml").is_file(), folder


# The Serve application


def test_serve_accepts_the_configuration(service: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(serve_config(service))
    assert schema.http_options.host == "0.0.0.0" and schema.http_options.port == SERVE_PORT
    # Serve ignores keys it does not know, so a typo is caught only by comparing.
    assert set(serve_config(service)) <= set(ServeDeploySchema.model_fields)
    assert set(application(service)) <= set(type(schema.applications[0]).model_fields)
    assert set(deployment(service)) <= set(type(schema.applications[0].deployments[0]).model_fields)
    assert set(serve_config(service)["http_options"]) <= set(type(schema.http_options).model_fields)


def test_our_own_schema_accepts_the_arguments(service: dict[str, Any]) -> None:
    assert engine_args(service).speculative_config.num_speculative_tokens == 16


@pytest.mark.parametrize(
    ("section", "typo"),
    [
        ((), "engine_kwarg"),
        (("engine_kwargs",), "tensor_paralel_size"),
        (("engine_kwargs", "speculative_config"), "num_speculative_token"),
        (("deployment_config",), "max_ongoing_request"),
        (("placement_group_config",), "bundles_per_worker"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else value,
)
def test_our_own_schema_refuses_a_misspelt_argument(
    service: dict[str, Any], section: tuple[str, ...], typo: str
) -> None:
    args = copy.deepcopy(application(service)["args"]) | {"deployment_config": {}}
    target = args
    for key in section:
        target = target[key]
    target[typo] = 1
    with pytest.raises(ConfigError, match=typo):
        AppArgs.load(args)


def builder(service: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    module, name = application(service)["import_path"].split(":")
    return getattr(importlib.import_module(module), name)


def test_the_import_path_is_a_builder_of_one_argument(service: dict[str, Any]) -> None:
    assert len(inspect.signature(builder(service)).parameters) == 1


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder without a cluster: one that another test started may be too small."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("no_cluster")
def test_replicas_are_counted_where_a_change_restarts_none_of_them(service: dict[str, Any]) -> None:
    """Serve treats a change of `args` as new code, and matches `deployments` by name."""
    from cluster.serve.controller import APP_NAME

    built = builder(service)(application(service)["args"])._bound_deployment
    assert deployment(service)["name"] == built.name == APP_NAME
    assert {"num_replicas", "graceful_shutdown_timeout_s"} <= deployment(service).keys()
    in_place = {"num_replicas", "autoscaling_config", "graceful_shutdown_timeout_s", "max_ongoing_requests"}
    assert not in_place & application(service)["args"].get("deployment_config", {}).keys()


@pytest.mark.usefixtures("no_cluster")
def test_the_application_builds_without_models_or_gpus(service: dict[str, Any]) -> None:
    from ray import serve

    assert isinstance(builder(service)(application(service)["args"]), serve.Application)


# Versions, names, sizes


def test_kuberay_accepts_the_name(service: dict[str, Any]) -> None:
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    assert len(service["metadata"]["name"]) <= 47


def test_the_ray_version_is_the_image_s_and_the_pinned_one(service: dict[str, Any]) -> None:
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == pinned_ray()
    for spec in pod_specs(service):
        assert f"-ray{pinned_ray()}-" in spec["containers"][0]["image"]
    assert f"ARG BASE=rayproject/ray:{pinned_ray()}-" in (MANIFESTS / "Dockerfile").read_text()


def test_the_proxies_of_every_pod_load_our_limits_and_errors() -> None:
    from cluster.serve.proxy import environment

    [(name, callback)] = environment().items()
    assert f"\nENV {name}={callback}\n" in (MANIFESTS / "Dockerfile").read_text()


def test_the_image_sets_what_the_command_sets_for_dead_peers_and_priority() -> None:
    from cluster.serve.ray_cluster import DEAD_PEER, PRIORITY

    lines = (MANIFESTS / "Dockerfile").read_text().splitlines()
    assert {f"ENV {name}={value}" for name, value in {**DEAD_PEER, **PRIORITY}.items()} <= set(lines)


def test_the_head_checks_proxies_and_replicas_as_the_command_does(service: dict[str, Any]) -> None:
    from cluster.serve.ray_cluster import CHECKS

    env = {each["name"]: each.get("value") for each in ray_container(head(service))["env"]}
    assert env.items() >= CHECKS.items()


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_every_image_has_a_tag_that_never_moves(folder: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for container in (c for document in render(folder) for spec in pod_specs(document) for c in containers(spec)):
        name, tag = container["image"].rsplit(":", 1)
        assert tag.startswith(f"{version}-") if name.endswith("/secateur") else re.fullmatch(r"\d+\.\d+\.\d+", tag)


def test_the_ray_container_comes_first(service: dict[str, Any]) -> None:
    assert ray_container(head(service))["name"] == "ray-head"
    assert ray_container(worker_group(service))["name"] == "ray-worker"


def test_the_ports_are_declared(service: dict[str, Any]) -> None:
    assert ports(ray_container(head(service))) == {
        "gcs-server": 6379,
        "dashboard": 8265,
        "client": 10001,
        "serve": SERVE_PORT,
        "metrics": 8080,
    }
    assert ports(ray_container(worker_group(service))) == {"serve": SERVE_PORT, "metrics": 8080}


def test_the_head_offers_ray_no_cpus_or_gpus(service: dict[str, Any]) -> None:
    group = head(service)
    assert group["rayStartParams"]["num-cpus"] == "0"
    limits = ray_container(group)["resources"]["limits"]
    assert "nvidia.com/gpu" not in limits
    assert quantity(limits["memory"]) >= 5 * 2**30


def test_kuberay_sizes_ray_by_the_container(service: dict[str, Any]) -> None:
    """The operator rejects a group's `resources` beside rayStartParams, and labels in these."""
    for group in (head(service), worker_group(service)):
        assert "resources" not in group and "labels" not in group["rayStartParams"]


def test_the_worker_count_lies_between_its_bounds(service: dict[str, Any]) -> None:
    group = worker_group(service)
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert deployment(service)["num_replicas"] == group["replicas"], "one pod holds one replica"


def test_a_pod_has_the_gpus_of_one_replica(service: dict[str, Any]) -> None:
    from cluster.convert import placement_config, resolve_devices
    from cluster.engine.rank_placement import num_bundles

    args = engine_args(service)
    resources = ray_container(worker_group(service))["resources"]
    gpus = int(resources["limits"].get("nvidia.com/gpu", 0))
    if args.device == "cpu":
        assert gpus == 0
        return
    assert gpus == num_bundles(placement_config(resolve_devices(args, num_gpus=None)))
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]
    assert any(item.get("key") == "nvidia.com/gpu" for item in worker_group(service)["template"]["spec"]["tolerations"])


def test_a_pod_holds_the_bundles_of_a_whole_replica(service: dict[str, Any]) -> None:
    from cluster.convert import placement_config, resolve_devices
    from cluster.serve.placement import group_bundles

    args = AppArgs.load(application(service)["args"])
    placement = args.placement_group_config
    config = placement_config(resolve_devices(args.engine_args(), num_gpus=None))
    bundles = group_bundles(config, per_worker=placement.bundle_per_worker, given=placement.bundles)
    assert placement.strategy == "STRICT_PACK"
    drafts = args.engine_args().speculative_config
    shared = drafts.draft_placement == "colocated" and drafts.draft_tensor_parallel_size
    copies = shared or drafts.method == "ngram"
    assert len(bundles) == config.world_size - copies, "every device has a bundle; looking up n-grams needs none"
    limits = ray_container(worker_group(service))["resources"]["limits"]
    fitting = []
    for resource, key in (("CPU", "cpu"), ("GPU", "nvidia.com/gpu")):
        if needed := sum(bundle.get(resource, 0) for bundle in bundles):
            fitting.append(int(quantity(limits[key]) // needed))
    assert min(fitting) == 1, "one pod holds one replica"


def test_a_pod_finishes_its_requests_before_ray_stops(service: dict[str, Any]) -> None:
    """Serve does not drain a deleted pod, and `ray stop` cuts off the replica's answers."""
    spec = worker_group(service)["template"]["spec"]
    shell, flag, script = ray_container(worker_group(service))["lifecycle"]["preStop"]["exec"]["command"]
    waits, limit = re.fullmatch(r"python -m ([\w.]+) --limit (\d+); ray stop", script).groups()
    assert (shell, flag, importlib.import_module(waits).__name__) == ("/bin/sh", "-c", "cluster.serve.drain")
    assert int(limit) + RAY_STOP_S <= spec["terminationGracePeriodSeconds"]


def test_probes_are_left_to_kuberay_and_a_proxy_runs_where_they_look(service: dict[str, Any]) -> None:
    for group in (head(service), worker_group(service)):
        assert not {"readinessProbe", "livenessProbe", "startupProbe"} & set(ray_container(group))
    assert serve_config(service)["proxy_location"] == "EveryNode"


def test_an_upgrade_never_needs_the_resources_twice(service: dict[str, Any]) -> None:
    assert service["spec"]["upgradeStrategy"] == {"type": "None"}
    assert "upgradeStrategy" not in service["spec"]["rayClusterConfig"]


# The model cache

CACHED = [overlay for overlay in OVERLAYS if overlay.name.startswith("llama")]


@pytest.mark.parametrize("overlay", CACHED, ids=short)
def test_the_download_fetches_the_models_that_are_served(overlay: Path) -> None:
    args = engine_args(service_of(overlay))
    [models] = [config_map["data"]["models"] for config_map in objects(overlay, "ConfigMap")]
    assert models.split() == [args.model, args.speculative_config.model]


@pytest.mark.parametrize("overlay", CACHED, ids=short)
def test_everyone_looks_for_the_models_where_the_download_puts_them(overlay: Path) -> None:
    pod = worker_group(service_of(overlay))["template"]["spec"]
    [job] = [spec for document in objects(overlay, "Job") for spec in pod_specs(document)]
    download, waiting, worker = job["containers"][0], pod["initContainers"][0], pod["containers"][0]
    for container in (download, waiting, worker):
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        hub = variables.get("HF_HUB_CACHE", f"{variables.get('HF_HOME')}/hub")
        assert hub == "/models/hub" and "/models" in mounts
        assert mounts["/models"].get("readOnly", False) is (container is not download)
        # Libraries write to HF_HOME, too: without the variable it is in the container.
        assert ("HF_HOME" in variables) is (container is download)
        assert ("HF_HUB_OFFLINE" in variables) is (container is not download)
    assert [c["command"][2] for c in (download, waiting)] == [
        "exec python -m cluster.fetch $MODELS",
        "exec python -m cluster.fetch --wait $MODELS",
    ]


@pytest.mark.parametrize("overlay", CACHED, ids=short)
def test_compiled_kernels_are_kept_on_a_volume(overlay: Path) -> None:
    container = ray_container(worker_group(service_of(overlay)))
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "compiled"]
    assert not mount.get("readOnly")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(variables[name]).parent == Path(mount["mountPath"])


# Several replicas


def with_components(tmp_path: Path, overlay: str, *components: str) -> Path:
    """Write an overlay with more components, and return its folder."""
    (tmp_path / "kustomization.yaml").write_text("")
    base, *more = (os.path.relpath(MANIFESTS / name, tmp_path) for name in (overlay, *components))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": [base], "components": more}))
    return tmp_path


@pytest.mark.parametrize("component", ["components/autoscaling", "components/rolling-upgrade"])
def test_the_autoscaler_may_add_pods_and_reaches_kubernetes(
    component: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from ray.serve.schema import ServeDeploySchema

    folder = with_components(tmp_path, "overlays/dev-cpu", component)
    service = service_of(folder)
    cluster, group = service["spec"]["rayClusterConfig"], worker_group(service)
    assert cluster["enableInTreeAutoscaling"] is True and cluster["autoscalerOptions"]["version"] == "v2"
    assert group["minReplicas"] <= group["replicas"] < group["maxReplicas"]
    # Autoscaler v2 removes pods itself; KubeRay refuses those that Kubernetes would restart.
    assert all(spec.get("restartPolicy", "Never") == "Never" for spec in pod_specs(service))
    on_head, on_worker = (spec["automountServiceAccountToken"] for spec in pod_specs(service))
    assert (on_head, on_worker) == (True, False), "the autoscaler runs in the head's pod"
    [reaching] = [
        p["spec"] for p in objects(folder, "NetworkPolicy") if p["metadata"]["name"].endswith("to-kubernetes")
    ]
    assert selects(reaching["podSelector"], {**RAY_POD, "ray.io/node-type": "head"})
    assert not selects(reaching["podSelector"], RAY_POD)
    assert {port["port"] for rule in reaching["egress"] for port in rule["ports"]} == {443, 6443}
    # What the component's head tells to write for Serve.
    text = (MANIFESTS / "components/autoscaling/kustomization.yaml").read_text()
    settings = yaml.safe_load("\n".join(re.findall(r"^#   (.+)$", text, re.MULTILINE)))
    config = serve_config(service)
    deployed = config["applications"][0]["deployments"][0]
    deployed.update(settings)
    ServeDeploySchema.model_validate(config)
    bounds = settings["autoscaling_config"]
    assert (bounds["min_replicas"], bounds["max_replicas"]) == (group["minReplicas"], group["maxReplicas"])
    target = bounds["target_ongoing_requests"] / engine_args(service).max_num_seqs
    assert target == pytest.approx(0.6, abs=0.05)
    if "SECATEUR_RAYSERVICE_SCHEMA" in os.environ:
        assert violations(request.getfixturevalue("schema"), service) == []


def test_a_rolling_upgrade_takes_a_quarter_more_and_not_all_twice(tmp_path: Path) -> None:
    strategy = service_of(with_components(tmp_path, "overlays/llama-70b-8gpu", "components/rolling-upgrade"))["spec"][
        "upgradeStrategy"
    ]
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    options = strategy["clusterUpgradeOptions"]
    assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] == 25
    assert options["gatewayClassName"] and options["intervalSeconds"] > 0


def test_the_route_leads_to_the_service_and_waits_longer_than_it() -> None:
    [route] = objects(MANIFESTS / "httproute", "HTTPRoute")
    [rule] = route["spec"]["rules"]
    services = [service_of(overlay) for overlay in OVERLAYS]
    assert rule["backendRefs"] == [{"name": f"{services[0]['metadata']['name']}-serve-svc", "port": SERVE_PORT}]
    longest = max(serve_config(service)["http_options"]["request_timeout_s"] for service in services)
    assert all(int(value.removesuffix("s")) > longest for value in rule["timeouts"].values())


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama-3.3-70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
"""What config.json says of the models of the packing table."""
PACKING = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/guides/kubernetes.md").read_text().splitlines()
    if line.startswith(tuple(f"| {name} |" for name in PUBLISHED))
]


@pytest.mark.parametrize("row", PACKING, ids=" ".join)
def test_the_packing_table_adds_up_and_fits(row: list[str], tmp_path: Path) -> None:
    from cluster.convert import placement_config, resolve_devices
    from cluster.engine.rank_placement import num_bundles
    from cluster.planner.report import run
    from secateur.config import EngineArgs
    from secateur.plan import HARDWARE, PlanRequest

    model, size, placement, gpus, pods, replicas = row
    config = PUBLISHED[model] | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = {"method": "eagle3", "model": "bundled:eagle3", "draft_placement": placement}
    shape = {"model": str(tmp_path), "device": "cuda", "tensor_parallel_size": int(size), "max_model_len": 8192}
    args = EngineArgs.load(shape | {"speculative_config": spec})
    assert num_bundles(placement_config(resolve_devices(args, num_gpus=None))) == int(gpus)
    assert (int(pods), int(replicas)) == (8 // int(gpus), 4 * (8 // int(gpus)))
    plain = EngineArgs.load(shape | {"no_speculation": True})  # the head takes a few GB
    run(plain, PlanRequest(hardware=HARDWARE["h100"], batches=(1,)))


def test_the_overlay_of_a_whole_node_leaves_no_gpu_idle() -> None:
    group = worker_group(service_of(MANIFESTS / "overlays/llama-70b-8gpu"))
    assert group["replicas"] * int(ray_container(group)["resources"]["limits"]["nvidia.com/gpu"]) == 8


# High availability


def test_the_state_of_the_head_outlives_it() -> None:
    overlay = MANIFESTS / "overlays" / "ha"
    service = service_of(overlay)
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    [redis], [address] = objects(overlay, "StatefulSet"), objects(overlay, "Service")
    assert options["redisAddress"] == f"{address['metadata']['name']}:{address['spec']['ports'][0]['port']}"
    labels = redis["spec"]["template"]["metadata"]["labels"]
    assert selects({"matchLabels": address["spec"]["selector"]}, labels)
    [password] = redis["spec"]["template"]["spec"]["containers"][0]["env"]
    assert options["redisPassword"]["valueFrom"] == password["valueFrom"]
    # The operator refuses these beside the options.
    names = {v["name"] for group in (head(service), worker_group(service)) for v in ray_container(group)["env"]}
    assert not names & {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}
    assert "redis-password" not in head(service)["rayStartParams"]
    [policy] = [p["spec"] for p in objects(overlay, "NetworkPolicy") if selects(p["spec"]["podSelector"], labels)]
    assert policy["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"ray.io/originated-from-cr-name": service["metadata"]["name"]}}}],
         "ports": [{"protocol": "TCP", "port": 6379}]}
    ]  # fmt: skip


def test_ha_differs_from_dev_cpu_only_in_what_changes_in_place() -> None:
    ha, dev = (application(service_of(MANIFESTS / "overlays" / name)) for name in ("ha", "dev-cpu"))
    assert (ha["deployments"][0].pop("num_replicas"), dev["deployments"][0].pop("num_replicas")) == (2, 1)
    assert ha == dev


def test_the_kueue_component_labels_the_service(tmp_path: Path) -> None:
    folder = with_components(tmp_path, "overlays/dev-cpu", "components/kueue")
    queued, plain = service_of(folder), service_of(MANIFESTS / "overlays" / "dev-cpu")
    assert queued["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "secateur"
    assert queued == plain
    assert "enableInTreeAutoscaling" not in plain["spec"]["rayClusterConfig"]


# Batch


def test_the_batch_job_asks_the_service_by_its_name_and_can_resume() -> None:
    [job] = objects(MANIFESTS / "batch", "Job")
    [spec] = pod_specs(job)
    [container] = spec["containers"]
    names = {service_of(path)["metadata"]["name"] for path in OVERLAYS}
    url = container["command"][container["command"].index("--base-url") + 1]
    assert {url} == {f"http://{name}-serve-svc:{SERVE_PORT}" for name in names}
    named = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert named == claims(MANIFESTS / "batch")


# Kubernetes' own schemas


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_kubernetes_accepts_every_object_of_its_own(folder: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    checked = 0
    for document in render(folder):
        if re.fullmatch(r"v1|(apps|batch|policy)/v1|networking\.k8s\.io/v1", document["apiVersion"]):
            validator.validate(document, KUBERNETES, strict=True)
            checked += 1
    assert checked or folder.name in ("monitoring", "httproute")


# KubeRay's schema

needs_schema = pytest.mark.skipif(
    "SECATEUR_RAYSERVICE_SCHEMA" not in os.environ, reason="SECATEUR_RAYSERVICE_SCHEMA names no schema"
)


def closed(schema: Any) -> Any:
    """Return the schema with unknown keys forbidden; as published, it accepts typos."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    result = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    return result


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    published = json.loads(Path(os.environ["SECATEUR_RAYSERVICE_SCHEMA"]).read_text())
    return {**closed(published), "required": ["apiVersion", "kind", "spec"]}


def violations(schema: dict[str, Any], service: dict[str, Any]) -> list[str]:
    from jsonschema import Draft7Validator

    Draft7Validator.check_schema(schema)
    return [f"{error.json_path}: {error.message[:200]}" for error in Draft7Validator(schema).iter_errors(service)]


@needs_schema
def test_kuberay_s_schema_accepts_the_service(schema: dict[str, Any], service: dict[str, Any]) -> None:
    assert violations(schema, service) == []


TYPOS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "kindd": lambda service: service,
    "serveConfigv2": lambda service: service["spec"],
    "workerGroupSpec": lambda service: service["spec"]["rayClusterConfig"],
    "min_replicas": worker_group,
    "toleration": lambda service: worker_group(service)["template"]["spec"],
    "resource": lambda service: ray_container(worker_group(service)),
    "secretName": lambda service: worker_group(service)["template"]["spec"]["volumes"][0],
}


@needs_schema
@pytest.mark.parametrize("typo", TYPOS)
def test_the_closed_schema_refuses_a_typo(schema: dict[str, Any], service: dict[str, Any], typo: str) -> None:
    TYPOS[typo](service)[typo] = {}
    assert any(repr(typo) in violation for violation in violations(schema, service))


@needs_schema
@pytest.mark.parametrize("key", ["apiVersion", "kind", "spec"])
def test_the_closed_schema_refuses_a_missing_key(schema: dict[str, Any], service: dict[str, Any], key: str) -> None:
    del service[key]
    assert violations(schema, service)


@needs_schema
def test_the_closed_schema_refuses_a_wrong_type(schema: dict[str, Any], service: dict[str, Any]) -> None:
    worker_group(service)["replicas"] = "one"
    assert violations(schema, service)
