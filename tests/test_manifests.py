"""The manifests, checked without a cluster: structure, arithmetic, Serve's schema and our own.

KubeRay's own schema is checked too where SECATEUR_RAYSERVICE_SCHEMA names the OpenAPI schema of RayService v1 as JSON.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from secateur.config import AppArgs
from secateur.errors import ConfigError

ROOT = Path(__file__).parents[1]
MANIFESTS = ROOT / "manifests"
OVERLAYS = sorted(path.parent for path in MANIFESTS.glob("overlays/*/rayservice.yaml"))
KUSTOMIZATIONS = sorted(path.parent for path in MANIFESTS.rglob("kustomization.yaml"))
FILES = sorted(MANIFESTS.rglob("*.yaml"))
SERVE_PORT = 8000
RAY_STOP_S = 20
"""It kills after 16 s what has not ended by itself."""
CLOSED_PORTS = {6379, 8265, 10001}  # GCS, dashboard and jobs, Ray client: whoever reaches them runs code
SECRET_NAME = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")


def short(path: Path) -> str:
    return str(path.relative_to(MANIFESTS))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def applied_with(overlay: Path) -> Iterator[dict[str, Any]]:
    """Return every object of a kustomization, including those of the folders that it includes."""
    for resource in documents(overlay / "kustomization.yaml")[0]["resources"]:
        path = (overlay / resource).resolve()
        yield from applied_with(path) if path.is_dir() else documents(path)


def serve_config(service: dict[str, Any]) -> dict[str, Any]:
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def application(service: dict[str, Any]) -> dict[str, Any]:
    [only] = serve_config(service)["applications"]
    return only


def deployment(service: dict[str, Any]) -> dict[str, Any]:
    """Return the deployment settings outside `args`, whose changes restart no replica."""
    [only] = application(service)["deployments"]
    return only


def head(service: dict[str, Any]) -> dict[str, Any]:
    return service["spec"]["rayClusterConfig"]["headGroupSpec"]


def worker_group(service: dict[str, Any]) -> dict[str, Any]:
    [only] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return only


def pod_specs(document: dict[str, Any]) -> list[dict[str, Any]]:
    match document["kind"]:
        case "RayService":
            return [group["template"]["spec"] for group in (head(document), worker_group(document))]
        case "Job":
            return [document["spec"]["template"]["spec"]]
        case _:
            return []


def ray_container(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]


def ports(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def quantity(text: str) -> float:
    """Parse a Kubernetes quantity: '250m' -> 0.25, '5Gi' -> 5 * 2**30."""
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text).groups()
    return float(number) * (units[unit] if unit else 1)


def pinned_ray() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [version] = [found[1] for line in extras["serve"] if (found := re.fullmatch(r"ray\[serve\]==(.+)", line))]
    return version


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def service(overlay: Path) -> dict[str, Any]:
    [only] = documents(overlay / "rayservice.yaml")
    return only


# Files


def test_there_is_one_service_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in OVERLAYS] == ["cpu-bundled", "gpu-llama3-8b"]


@pytest.mark.parametrize("path", FILES, ids=short)
def test_every_document_names_its_kind(path: Path) -> None:
    for document in documents(path):
        assert document["apiVersion"] and document["kind"]
        assert document["kind"] == "Kustomization" or document["metadata"]["name"]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=short)
def test_a_kustomization_lists_exactly_the_files_beside_it(folder: Path) -> None:
    [kustomization] = documents(folder / "kustomization.yaml")
    listed = {(folder / resource).resolve() for resource in kustomization["resources"]}
    assert {path for path in listed if path.is_file()} == set(folder.glob("*.yaml")) - {folder / "kustomization.yaml"}
    assert all((path / "kustomization.yaml").is_file() for path in listed if path.is_dir())
    for generator in kustomization.get("configMapGenerator", []):
        assert all((folder / name).is_file() for name in generator["files"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=short)
def test_kubectl_renders_every_kustomization(folder: Path) -> None:
    rendered = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert rendered.returncode == 0, rendered.stderr
    [kustomization] = documents(folder / "kustomization.yaml")
    names = {image["newName"] + ":" + image["newTag"] for image in kustomization.get("images", [])}
    for document in yaml.safe_load_all(rendered.stdout):
        for spec in pod_specs(document):
            assert {container["image"] for container in spec["containers"]} == names, "the image is set in one place"


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
    args = AppArgs.load(application(service)["args"])
    assert args.engine_args().speculative_config.method == "eagle3"


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


def test_replicas_are_counted_where_a_change_restarts_none_of_them(service: dict[str, Any]) -> None:
    """Serve treats a change of `args` as new code, and matches `deployments` by name."""
    from cluster.serve.controller import APP_NAME

    built = builder(service)(application(service)["args"])._bound_deployment
    assert deployment(service)["name"] == built.name == APP_NAME
    assert {"num_replicas", "graceful_shutdown_timeout_s"} <= deployment(service).keys()
    in_place = {"num_replicas", "autoscaling_config", "graceful_shutdown_timeout_s", "max_ongoing_requests"}
    assert not in_place & application(service)["args"].get("deployment_config", {}).keys()


def test_the_application_builds_without_models_or_gpus(service: dict[str, Any]) -> None:
    from ray import serve

    assert isinstance(builder(service)(application(service)["args"]), serve.Application)


# Versions, names, sizes


def test_kuberay_accepts_the_name(service: dict[str, Any]) -> None:
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    assert len(service["metadata"]["name"]) <= 47


def test_the_ray_version_is_the_image_s_and_the_pinned_one(service: dict[str, Any], overlay: Path) -> None:
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == pinned_ray()
    for spec in pod_specs(service):
        assert f"-ray{pinned_ray()}-" in spec["containers"][0]["image"]
    for image in documents(overlay / "kustomization.yaml")[0]["images"]:
        assert f"-ray{pinned_ray()}-" in image["newTag"]
    assert f"ARG BASE=rayproject/ray:{pinned_ray()}-" in (MANIFESTS / "Dockerfile").read_text()


def test_the_proxies_of_every_pod_load_our_limits_and_errors() -> None:
    from cluster.serve.proxy import environment

    [(name, callback)] = environment().items()
    assert f"\nENV {name}={callback}\n" in (MANIFESTS / "Dockerfile").read_text()


def test_every_image_has_a_tag_that_never_moves() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for path in FILES:
        for document in documents(path):
            for spec in pod_specs(document):
                for container in spec["containers"] + spec.get("initContainers", []):
                    assert container["image"].startswith(f"secateur:{version}-"), short(path)
            for image in document.get("images", []) if document["kind"] == "Kustomization" else []:
                assert image["newTag"].startswith(f"{version}-"), short(path)


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
    assert deployment(service)["num_replicas"] <= group["replicas"], "one pod holds one replica"


def test_a_pod_has_a_gpu_for_every_rank(service: dict[str, Any]) -> None:
    args = AppArgs.load(application(service)["args"]).engine_args()
    resources = ray_container(worker_group(service))["resources"]
    ranks = args.tensor_parallel_size + args.speculative_config.draft_tensor_parallel_size
    gpus = int(resources["limits"].get("nvidia.com/gpu", 0))
    if args.device == "cpu":
        assert gpus == 0
        return
    assert gpus >= ranks
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
    assert len(bundles) == config.world_size, "drafter and verifier have a bundle each"
    limits = ray_container(worker_group(service))["resources"]["limits"]
    for resource, key in (("CPU", "cpu"), ("GPU", "nvidia.com/gpu")):
        assert sum(bundle.get(resource, 0) for bundle in bundles) <= quantity(limits.get(key, "0"))


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


# Safety


def test_the_ray_cluster_asks_for_a_token(service: dict[str, Any]) -> None:
    assert service["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"


def test_secrets_are_only_referred_to() -> None:
    for path in FILES:
        for document in documents(path):
            assert document["kind"] != "Secret", short(path)
            for spec in pod_specs(document):
                for container in spec["containers"]:
                    for variable in container.get("env", []):
                        if SECRET_NAME.search(variable["name"]):
                            assert "value" not in variable, short(path)
                            assert set(variable["valueFrom"]["secretKeyRef"]) == {"name", "key"}, short(path)


def test_the_pod_that_answers_requests_knows_the_api_key(service: dict[str, Any]) -> None:
    variables = {variable["name"] for variable in ray_container(worker_group(service))["env"]}
    assert "SECATEUR_API_KEY" in variables
    assert "api_key" not in application(service)["args"]["engine_kwargs"]


def test_the_service_reads_the_api_key_of_its_pod() -> None:
    """Without it the service would need no key."""
    assert any("SECATEUR_API_KEY" in path.read_text() for path in (ROOT / "cluster").rglob("*.py"))


def test_no_container_may_gain_privileges() -> None:
    for path in FILES:
        for document in documents(path):
            for spec in pod_specs(document):
                assert spec["securityContext"]["runAsNonRoot"] is True, short(path)
                for container in spec["containers"]:
                    assert container["securityContext"]["allowPrivilegeEscalation"] is False, short(path)


def test_only_the_http_port_is_open_to_everyone(overlay: Path) -> None:
    policies = [document for document in applied_with(overlay) if document["kind"] == "NetworkPolicy"]
    rules = [rule for policy in policies for rule in policy["spec"].get("ingress", [])]
    assert [{port["port"] for port in rule["ports"]} for rule in rules if "from" not in rule] == [{SERVE_PORT}]
    operator = [rule for rule in rules if "kuberay-operator" in json.dumps(rule)]
    assert [{port["port"] for port in rule["ports"]} for rule in operator] == [{8265, SERVE_PORT}]
    for rule in rules:
        if CLOSED_PORTS & {port["port"] for port in rule.get("ports", [])}:
            assert all(set(peer) == {"namespaceSelector", "podSelector"} for peer in rule["from"])


def test_policies_and_budgets_select_the_pods_of_the_service(service: dict[str, Any], overlay: Path) -> None:
    name = service["metadata"]["name"]
    kinds = {}
    for document in applied_with(overlay):
        kinds.setdefault(document["kind"], []).append(document["spec"])
    selectors = [spec["podSelector"] for spec in kinds["NetworkPolicy"]]
    selectors += [spec["selector"] for spec in kinds["PodDisruptionBudget"]]
    assert all(s["matchLabels"]["ray.io/originated-from-cr-name"] == name for s in selectors)
    budgets = [spec["selector"]["matchLabels"]["ray.io/node-type"] for spec in kinds["PodDisruptionBudget"]]
    assert budgets == ["head", "worker"]


def pod_monitor() -> dict[str, Any]:
    [only] = documents(MANIFESTS / "monitoring" / "podmonitor.yaml")
    return only["spec"]


def scraped(endpoint: dict[str, Any], service: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups whose pods an endpoint keeps after relabeling."""
    groups = {"head": head(service), "worker": worker_group(service)}
    label = "__meta_kubernetes_pod_label_ray_io_node_type"
    keep = [r["regex"] for r in endpoint["relabelings"] if (r["action"], r["sourceLabels"]) == ("keep", [label])]
    return [group for name, group in groups.items() if all(re.fullmatch(regex, name) for regex in keep)]


def test_the_pod_monitor_finds_the_pods_and_every_port(service: dict[str, Any]) -> None:
    """An undeclared port name is not an error, but Prometheus would find no target."""
    assert pod_monitor()["selector"]["matchLabels"]["ray.io/originated-from-cr-name"] == service["metadata"]["name"]
    for endpoint in pod_monitor()["podMetricsEndpoints"]:
        groups = scraped(endpoint, service)
        assert groups
        assert all(endpoint["port"] in ports(ray_container(group)) for group in groups)


def test_our_metrics_are_collected_where_a_replica_runs(service: dict[str, Any]) -> None:
    [ours] = [endpoint for endpoint in pod_monitor()["podMetricsEndpoints"] if endpoint.get("path") == "/metrics"]
    assert scraped(ours, service) == [worker_group(service)]
    assert ports(ray_container(worker_group(service)))[ours["port"]] == SERVE_PORT


def test_prometheus_may_reach_every_port_it_scrapes(service: dict[str, Any], overlay: Path) -> None:
    policies = [document for document in applied_with(overlay) if document["kind"] == "NetworkPolicy"]
    rules = [rule for policy in policies for rule in policy["spec"].get("ingress", [])]
    [allowed] = [{port["port"] for port in rule["ports"]} for rule in rules if '"monitoring"' in json.dumps(rule)]
    assert allowed == {
        ports(ray_container(group))[endpoint["port"]]
        for endpoint in pod_monitor()["podMetricsEndpoints"]
        for group in scraped(endpoint, service)
    }


def test_every_mounted_volume_and_claim_exists(overlay: Path) -> None:
    objects = list(applied_with(overlay))
    claims = {document["metadata"]["name"] for document in objects if document["kind"] == "PersistentVolumeClaim"}
    for spec in (spec for document in objects for spec in pod_specs(document)):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounts = {mount["name"] for container in spec["containers"] for mount in container.get("volumeMounts", [])}
        assert mounts == set(volumes)
        assert {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values()} <= claims


def test_the_model_cache_is_where_hugging_face_looks() -> None:
    [service] = documents(MANIFESTS / "overlays" / "gpu-llama3-8b" / "rayservice.yaml")
    container = ray_container(worker_group(service))
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["HF_HOME"] in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_batch_job_asks_the_service_by_its_name_and_can_resume() -> None:
    objects = {document["kind"]: document for document in applied_with(MANIFESTS / "batch")}
    [spec] = pod_specs(objects["Job"])
    [container] = spec["containers"]
    names = {documents(path / "rayservice.yaml")[0]["metadata"]["name"] for path in OVERLAYS}
    url = container["command"][container["command"].index("--base-url") + 1]
    assert {url} == {f"http://{name}-serve-svc:{SERVE_PORT}" for name in names}
    claims = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {objects["PersistentVolumeClaim"]["metadata"]["name"]}


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
    "secretRef": lambda service: ray_container(worker_group(service))["env"][0]["valueFrom"],
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
