"""The Kubernetes manifests as `kubectl kustomize` renders them, which needs no cluster."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = sorted(path.parent for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))
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
