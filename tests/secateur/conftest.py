"""Fixtures of runs of batch files, and of commands that would start an engine."""

import contextlib
import sys
import types
from pathlib import Path

import pytest

from secateur import config
from secateur.config import EngineArgs
from tests.support.batch_runs import line, write

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path) -> Path:
    return write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(30)])


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def cluster(monkeypatch):
    """A stand-in for the cluster package: `calls` holds what the commands passed."""
    calls: list[tuple[str, EngineArgs]] = []

    @contextlib.contextmanager
    def local_service(args, *, shows_progress):
        calls.append(("local_service", args))
        yield "http://local"

    app = types.ModuleType("cluster.serve.launch")
    app.serve = lambda args: calls.append(("serve", args))  # type: ignore[attr-defined]
    service = types.ModuleType("cluster.local_service")
    service.local_service = local_service  # type: ignore[attr-defined]
    report = types.ModuleType("cluster.planner.report")
    report.run = lambda args, request, **_: f"plan of {args.model}"  # type: ignore[attr-defined]
    package = types.ModuleType("cluster")
    package.__path__ = [str(ROOT / "cluster")]  # what is not replaced is the real one's
    monkeypatch.setitem(sys.modules, "cluster", package)
    monkeypatch.setitem(sys.modules, "cluster.serve.launch", app)
    monkeypatch.setitem(sys.modules, "cluster.local_service", service)
    monkeypatch.setitem(sys.modules, "cluster.planner", types.ModuleType("cluster.planner"))
    monkeypatch.setitem(sys.modules, "cluster.planner.report", report)
    monkeypatch.setattr(config, "resolve_model", lambda name: name)
    monkeypatch.delenv("SECATEUR_API_KEY", raising=False)
    return calls
