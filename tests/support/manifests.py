"""The Kubernetes manifests as `kubectl kustomize` renders them, which needs no cluster."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from secateur.config import AppArgs

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = sorted(path.parent for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))
KUSTOMIZATIONS = sorted(path.parent for path in MANIFESTS.rglob("kustomization.yaml"))
APPLIED = [*OVERLAYS, *(MANIFESTS / name for name in ("batch", "httproute", "monitoring"))]
SERVE_PORT = 8000
KUBERNETES = "1.34"
RAY_STOP_S = 20
"""It kills after 16 s what has not ended by itself."""
CLOSED_PORTS = {6379, 8265, 10001}  # GCS, dashboard and jobs, Ray client: whoever reaches them runs code
RAY_POD = {"ray.io/originated-from-cr-name": "secateur", "ray.io/node-type": "worker"}
SECRET_NAME = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")
RENDERER = shutil.which("kubectl")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML has it

needs_kubectl = pytest.mark.skipif(RENDERER is None, reason="kubectl is not installed")


def render(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k folder` would send, the caller's to change."""
    return list(yaml.load_all(_rendered(folder), Loader=_Loader))


@functools.cache
def _rendered(folder: Path) -> str:
    assert RENDERER is not None
    result = subprocess.run([RENDERER, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def service_of(folder: Path) -> dict[str, Any]:
    """Return the RayService of an overlay."""
    [only] = [document for document in render(folder) if document["kind"] == "RayService"]
    return only


def serve_config(service: dict[str, Any]) -> dict[str, Any]:
    """Return the Serve configuration of a RayService."""
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def application(service: dict[str, Any]) -> dict[str, Any]:
    [only] = serve_config(service)["applications"]
    return only


def short(path: Path) -> str:
    return str(path.relative_to(MANIFESTS))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def objects(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [document for document in render(folder) if document["kind"] == kind]


def engine_args(service: dict[str, Any]) -> Any:
    return AppArgs.load(application(service)["args"]).engine_args()


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
        case "Job" | "StatefulSet":
            return [document["spec"]["template"]["spec"]]
        case _:
            return []


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", []), *spec["containers"]]


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


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


def claims(folder: Path) -> set[str]:
    return {claim["metadata"]["name"] for claim in objects(folder, "PersistentVolumeClaim")}
