"""The allowed imports between packages, checked in the source files, `import_module` with a literal included.

secateur and workers are leaves; drafter and verifier import workers; cluster may import all of these. bench and
training may import the whole product; nobody imports them. The commands of secateur.cli that run models may import
cluster inside a function body. Of the product only cluster imports ray and the web framework; secateur imports no torch
either.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = {"secateur", "workers", "drafter", "verifier", "cluster"}
FOLDERS = PRODUCT | {"bench", "training"}
MAY_IMPORT = {
    "secateur": {"secateur"},
    "workers": {"workers"},
    "drafter": {"drafter", "workers"},
    "verifier": {"verifier", "workers"},
    "cluster": PRODUCT,
    "bench": PRODUCT | {"bench"},
    "training": PRODUCT | {"training"},
}
ONLY_CLUSTER = {"ray", "fastapi", "starlette", "uvicorn"}
NEVER_IN_SECATEUR = {"torch", "transformers", "safetensors", "triton", "numpy"} | ONLY_CLUSTER


def imported_by_name(node: ast.AST) -> str | None:
    """Return the literal name that a call of `import_module` or `__import__` imports."""
    match node:
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return name
    return None


def imports_of(source: str) -> list[tuple[str, int]]:
    """Return (top-level package, line) of every absolute import, also inside functions."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found.extend((alias.name.split(".")[0], node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                found.append((module.split(".")[0], node.lineno))
            case ast.Call() if (name := imported_by_name(node)) is not None:
                found.append((name.split(".")[0], node.lineno))
    return found


def broken_rules(module: str, source: str) -> list[str]:
    """Return the imports of `module` that violate the rules above."""
    folder = module.split(".")[0]
    broken = []
    for name, line in imports_of(source):
        if name in FOLDERS and name not in MAY_IMPORT[folder]:
            broken.append(f"{module}:{line} imports {name}")
        if name in ONLY_CLUSTER and folder not in ("cluster", "bench", "training"):
            broken.append(f"{module}:{line} imports {name}; only cluster may")
        elif folder == "secateur" and name in NEVER_IN_SECATEUR:
            broken.append(f"{module}:{line} imports {name}; secateur never does")
    return broken


def source_files() -> list[tuple[str, Path]]:
    files = [path for folder in sorted(FOLDERS) for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in files]


def test_every_file_keeps_the_import_direction():
    files = source_files()
    assert [rule for module, path in files for rule in broken_rules(module, path.read_text())] == []


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the import cycles, also those of imports inside functions (Tarjan's components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(imports[module]):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in imports:
        if module not in number:
            visit(module)
    return found


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """Return the `modules` that a file imports, also inside functions and for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if (name := imported_by_name(node)) is not None:
            found.add(name)
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(parent), level=0, names=names):
                inner = {f"{parent}.{alias.name}" for alias in names}
                found |= inner & modules or {parent}
    return found & modules


def test_no_import_cycles():
    files = dict(source_files())
    imports = {module: imported_modules(path.read_text(), set(files)) - {module} for module, path in files.items()}
    assert circles(imports) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def room_of(module: str) -> str:
    """Return the folder of a module, such as `workers.kernels`, or the module itself if it is in none."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else module


def test_no_import_cycles_of_folders():
    files = dict(source_files())
    rooms: dict[str, set[str]] = {room_of(module): set() for module in files}
    for module, path in files.items():
        others = {room_of(other) for other in imported_modules(path.read_text(), set(files))}
        rooms[room_of(module)] |= others - {room_of(module)}
    assert circles(rooms) == []


def test_the_http_service_the_planner_and_benchmarks_do_not_import_ray():
    users = {module for module, path in source_files() for name, *_ in imports_of(path.read_text()) if name == "ray"}
    rooms = ("bench", "batches", "engine", "http", "observe", "openai", "planner", "system", "text")
    without = ("bench.", *(f"cluster.{room}." for room in rooms))
    assert users and not {module for module in users if module.startswith(without)}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("secateur.client", "import torch"),
        ("secateur.client", "import ray.serve"),
        ("secateur.client", "def f():\n    from cluster.serve.launch import serve"),
        ("secateur.cli.serving", "from cluster.serve.launch import serve"),
        ("secateur.cli.serving", "def f():\n    import torch"),
        ("secateur.cli.serving", "def f():\n    import verifier.engine"),
        ("secateur.cli.talking", "from cluster.local_service import local_service"),
        ("secateur.cli.talking", "def f():\n    import ray"),
        ("secateur.cli.bench", "from cluster.bench.step import run"),
        ("secateur.cli.bench", "if True:\n    import cluster.bench.step"),
        ("secateur.cli.__init__", "def f():\n    from cluster.serve.launch import serve"),
        ("secateur.cli.checks", "def f():\n    import cluster"),
        ("workers.comm.wire", "import secateur.config"),
        ("workers.comm.wire", "if True:\n    import drafter"),
        ("drafter.tree.grow", "from verifier.tree import tree_metadata"),
        ("verifier.engine", "from drafter import grow"),
        ("verifier.engine", "class A:\n    def f(self):\n        import ray"),
        ("drafter.loop", "import fastapi"),
        ("cluster.bench.step", "import bench.speed"),
        ("bench.speed", "import training.head"),
        ("workers.types", "import training.data"),
        ("secateur.cli.bench", "def f():\n    from bench.speed import run"),
        ("workers.comm.wire", "import importlib\nimportlib.import_module('drafter.worker')"),
        ("verifier.engine", "def f():\n    import_module('drafter.worker', None)"),
    ],
)
def test_the_checker_sees_a_forbidden_import(module, source):
    assert broken_rules(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("drafter.tree.grow", "from workers.types import TreeBatch"),
        ("drafter.tree.grow", "from . import prune"),
        ("cluster.serve.app", "import ray, verifier, drafter, workers, secateur"),
        ("bench.speed", "import cluster, drafter, bench.peers, secateur.cli"),
        ("workers.comm.wire", "import_module(name)"),
    ],
)
def test_the_checker_accepts_allowed_imports(module, source):
    assert broken_rules(module, source) == []


def test_importing_every_module_of_secateur_loads_no_heavy_package():
    modules = [module for module, _ in source_files() if module.startswith("secateur") and ".bundled" not in module]
    heavy = sorted(NEVER_IN_SECATEUR)
    code = "\n".join(
        ["import importlib, sys"]
        + [f"importlib.import_module({module!r})" for module in modules]
        + [f"sys.exit(' '.join(sorted(set({heavy!r}) & sys.modules.keys())) or 0)"]
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_secateur_loads_none_of_its_dependencies():
    code = "import sys, secateur; sys.exit(' '.join({'pydantic', 'httpx2', 'rich', 'typer'} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_all_public_names_exist_and_are_listed_once():
    import secateur

    assert sorted(secateur.__all__) == sorted(set(secateur.__all__))
    assert [name for name in secateur.__all__ if getattr(secateur, name, None) is None] == []
    assert set(secateur._HOME_OF) | {"__version__"} == set(secateur.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    import secateur

    with pytest.raises(AttributeError, match="Clent"):
        _ = secateur.Clent


def test_gpu_tests_need_no_package_that_a_gpu_machine_may_lack():
    """`make gpu` installs nothing."""
    lacking = {"hypothesis", "scipy", "openai", "jsonschema", "ray", "fastapi"}
    code = (
        "import os, sys, pytest\n"
        "os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\n"
        f"sys.modules.update(dict.fromkeys({sorted(lacking)!r}))\n"
        "sys.exit(pytest.main(['--collect-only', '-q', 'tests/gpu']))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr


def test_benchmarks_of_make_gpu_need_no_web_framework():
    """`make gpu` installs nothing."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['fastapi', 'prometheus_client', 'ray', 'starlette', 'uvicorn']))\n"
        "import secateur.cli, bench.speed, bench.forward, bench.kernels, bench.gpu_profile, cluster.bench.step\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
