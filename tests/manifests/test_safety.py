"""What the manifests let nobody do, and what they let Prometheus see."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import (
    APPLIED,
    CLOSED_PORTS,
    MANIFESTS,
    RAY_POD,
    SECRET_NAME,
    SERVE_PORT,
    claims,
    containers,
    documents,
    engine_args,
    head,
    needs_kubectl,
    objects,
    pod_specs,
    ports,
    ray_container,
    render,
    selects,
    short,
    worker_group,
)

pytestmark = needs_kubectl


def test_the_ray_cluster_asks_for_a_token_which_its_version_knows(service: dict[str, Any]) -> None:
    from ray._raylet import AuthenticationMode  # type: ignore[attr-defined]  # compiled

    mode = service["spec"]["rayClusterConfig"]["authOptions"]["mode"]
    assert mode == "token" and hasattr(AuthenticationMode, mode.upper())


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_secrets_are_only_referred_to(folder: Path) -> None:
    for document in render(folder):
        assert document["kind"] != "Secret"
        for variable in (v for spec in pod_specs(document) for c in containers(spec) for v in c.get("env", [])):
            if SECRET_NAME.search(variable["name"]):
                assert "value" not in variable
                assert {"name", "key"} <= set(variable["valueFrom"]["secretKeyRef"]) <= {"name", "key", "optional"}


def test_the_service_reads_its_keys_from_a_mounted_secret(service: dict[str, Any]) -> None:
    """Without keys the service would answer everyone."""
    file = Path(engine_args(service).api_key_file)
    [mount] = [m for m in ray_container(worker_group(service))["volumeMounts"] if Path(m["mountPath"]) == file.parent]
    assert mount["readOnly"] is True and "subPath" not in mount, "Kubernetes never updates a file mounted by subPath"
    volumes = {volume["name"]: volume for volume in worker_group(service)["template"]["spec"]["volumes"]}
    secret = volumes[mount["name"]]["secret"]["secretName"]
    assert f"secret generic {secret} --from-file={file.name}=" in (MANIFESTS / "README.md").read_text()


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_no_container_may_gain_privileges(folder: Path) -> None:
    for spec in (spec for document in render(folder) for spec in pod_specs(document)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(spec):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def ingress_rules(overlay: Path) -> list[dict[str, Any]]:
    """Return the rules that say who may reach a Ray pod."""
    policies = [policy["spec"] for policy in objects(overlay, "NetworkPolicy")]
    mine = [policy for policy in policies if selects(policy["podSelector"], RAY_POD)]
    assert any("Ingress" in policy["policyTypes"] for policy in mine)
    return [rule for policy in mine for rule in policy.get("ingress", [])]


def test_only_the_http_port_is_open_to_everyone(overlay: Path) -> None:
    rules = ingress_rules(overlay)
    assert [{port["port"] for port in rule["ports"]} for rule in rules if "from" not in rule] == [{SERVE_PORT}]
    operator = [rule for rule in rules if "kuberay-operator" in json.dumps(rule)]
    assert [{port["port"] for port in rule["ports"]} for rule in operator] == [{8265, SERVE_PORT}]
    for rule in rules:
        if CLOSED_PORTS & {port["port"] for port in rule.get("ports", [])}:
            assert all(set(peer) == {"namespaceSelector", "podSelector"} for peer in rule["from"])


def test_every_pod_is_under_a_policy_for_both_directions(overlay: Path) -> None:
    pods = [RAY_POD, *(d["spec"]["template"]["metadata"]["labels"] for kind in ("Job", "StatefulSet")
                       for d in objects(overlay, kind))]  # fmt: skip
    policies = [policy["spec"] for policy in objects(overlay, "NetworkPolicy")]
    for labels in pods:
        mine = [policy for policy in policies if selects(policy["podSelector"], labels)]
        types = {kind for policy in mine for kind in policy["policyTypes"]}
        assert types == {"Ingress", "Egress"}


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_no_pod_has_a_token_of_kubernetes(folder: Path) -> None:
    assert all(spec["automountServiceAccountToken"] is False for d in render(folder) for spec in pod_specs(d))


def test_only_the_download_reaches_the_internet(overlay: Path) -> None:
    for policy in objects(overlay, "NetworkPolicy"):
        everywhere = [rule for rule in policy["spec"].get("egress", []) if "to" not in rule]
        reached = {port["port"] for rule in everywhere for port in rule["ports"]}
        assert reached <= ({53, 443} if policy["metadata"]["name"] == "secateur-models" else {53})


def test_budgets_select_the_pods_of_the_service(service: dict[str, Any], overlay: Path) -> None:
    selectors = [budget["spec"]["selector"]["matchLabels"] for budget in objects(overlay, "PodDisruptionBudget")]
    assert {s["ray.io/originated-from-cr-name"] for s in selectors} == {service["metadata"]["name"]}
    assert [s["ray.io/node-type"] for s in selectors] == ["head", "worker"]


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
    rules = [rule for rule in ingress_rules(overlay) if '"monitoring"' in json.dumps(rule)]
    [allowed] = [{port["port"] for port in rule["ports"]} for rule in rules]
    assert allowed == {
        ports(ray_container(group))[endpoint["port"]]
        for endpoint in pod_monitor()["podMetricsEndpoints"]
        for group in scraped(endpoint, service)
    }


@pytest.mark.parametrize("folder", APPLIED, ids=short)
def test_every_mounted_volume_claim_and_config_map_exists(folder: Path) -> None:
    maps = {document["metadata"]["name"]: document["data"] for document in objects(folder, "ConfigMap")}
    for document in render(folder):
        templates = document["spec"].get("volumeClaimTemplates", []) if "spec" in document else []
        for spec in pod_specs(document):
            volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
            mounts = {mount["name"] for c in containers(spec) for mount in c.get("volumeMounts", [])}
            assert mounts == set(volumes) | {template["metadata"]["name"] for template in templates}
            named = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values()
                     if "persistentVolumeClaim" in volume]  # fmt: skip
            assert set(named) <= claims(folder)
            assert {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume} <= set(maps)
            for variable in (v for c in containers(spec) for v in c.get("env", [])):
                if reference := variable.get("valueFrom", {}).get("configMapKeyRef"):
                    assert reference["key"] in maps[reference["name"]]
