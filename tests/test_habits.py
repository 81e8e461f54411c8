"""Every test contains an assertion that can fail, and none that fails on a slow machine."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TESTS = Path(__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
RAISING = {"raises", "warns", "fail", "deprecated_call"}
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


@functools.cache
def called_names(function: Function) -> set[str]:
    """Return the names of the functions and methods that `function` calls."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {getattr(call, "id", None) or getattr(call, "attr", "") for call in calls}


@functools.cache
def asserts(function: Function) -> bool:
    """Return whether the body contains an assert, pytest.raises or similar, or a call to a library's assert_*."""
    if any(isinstance(node, ast.Assert) for node in ast.walk(function)):
        return True
    return any(name in RAISING or name.startswith("assert_") for name in called_names(function))


def silent_tests(source: str, support: set[str]) -> list[str]:
    """Return the tests that neither assert nor call an asserting function of their module or of `support`."""
    functions = list(functions_of(ast.parse(source)))
    helpers = {function.name for function in functions if asserts(function)} | support
    return [
        function.name
        for function in functions
        if function.name.startswith("test_") and not asserts(function) and not called_names(function) & helpers
    ]


def test_every_test_asserts_something():
    sources = {path: path.read_text() for path in sorted(TESTS.rglob("*.py"))}
    shared = [ast.parse(source).body for path, source in sources.items() if path.parent.name == "support"]
    functions = [node for body in shared for node in body if isinstance(node, Function)]
    support = {function.name for function in functions if asserts(function)}
    found = {str(path.relative_to(TESTS)): silent_tests(source, support) for path, source in sources.items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("body", ["run()", "run(); asserted = 1", "with suppress(ValueError): run()", "value = helper"])
def test_the_check_finds_a_test_that_asserts_nothing(body):
    assert silent_tests(f"def helper(): assert run()\ndef test_it():\n    {body}", set()) == ["test_it"]


@pytest.mark.parametrize(
    "body",
    ["assert run()", "helper()", "compare(1, 2)", "np.testing.assert_allclose(1, 1)", "with pytest.raises(E): run()"],
)
def test_the_check_accepts_a_test_that_can_fail(body):
    source = f"from tests.support.cases import compare\ndef helper(): assert run()\ndef test_it():\n    {body}"
    assert silent_tests(source, {"compare"}) == []


def is_clock(node: ast.AST) -> bool:
    """Return whether a node is a call of `time.monotonic` or the like."""
    called = getattr(node, "func", None)
    return isinstance(called, ast.Attribute) and called.attr in CLOCKS and getattr(called.value, "id", "") == "time"


def tells_elapsed(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression subtracts from what a clock shows, or has one of these names."""
    return any(
        (isinstance(part, ast.Name) and part.id in names)
        or (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and is_clock(part.left))
        for part in ast.walk(node)
    )


def asserts_on_time(source: str) -> list[int]:
    """Return the lines of assertions on how long something took. `now < deadline` may end a wait."""
    lines = set()
    for function in functions_of(ast.parse(source)):
        names: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and tells_elapsed(node.value, set()):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        lines |= {
            node.lineno
            for node in ast.walk(function)
            if isinstance(node, ast.Assert) and tells_elapsed(node.test, names)
        }
    return sorted(lines)


def test_no_test_asserts_on_elapsed_time():
    found = {
        str(path.relative_to(TESTS)): asserts_on_time(source)
        for path in sorted(TESTS.rglob("*.py"))
        if any(f"time.{clock}(" in (source := path.read_text()) for clock in CLOCKS)
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("began = time.monotonic(); run(); assert time.monotonic() - began < 5", True),
        ("began = time.perf_counter(); run(); took = time.perf_counter() - began; assert took < 5", True),
        ("deadline = time.monotonic() + 60; assert time.monotonic() < deadline", False),
        ("assert run() < 5", False),
    ],
)
def test_the_check_finds_assertions_on_time(body, is_found):
    assert asserts_on_time(f"def test_it():\n    {body}") == ([2] if is_found else [])


def test_no_two_classes_of_the_product_have_the_same_name() -> None:
    homes: dict[str, list[str]] = {}
    for folder in ("secateur", "workers", "drafter", "verifier", "cluster"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert homes and {name: places for name, places in homes.items() if len(places) > 1} == {}
