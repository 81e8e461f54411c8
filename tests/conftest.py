"""Options, hypothesis profiles and Triton's interpreter, for all tests. Helpers are in tests/support."""

import functools
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

# Without a GPU Triton's kernels run in its interpreter. Triton reads this at its first import.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# torch's cache of compiled code does not tell one instruction set from another: code for AVX-512 that is read by a
# process which is to use AVX2 computes half of its elements.
if instructions := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{instructions}")
if importlib.util.find_spec("hypothesis"):  # no test of tests/gpu needs it
    from hypothesis import Phase, settings

    settings.register_profile("patient", deadline=None)  # a busy machine is no failure
    # The same examples for every mutant, and none made smaller: that it fails is enough.
    quick = {"deadline": None, "derandomize": True, "database": None, "phases": (Phase.explicit, Phase.generate)}
    settings.register_profile("mutants", **quick)
    settings.load_profile("patient")


# Tests in these folders, or in a module that mentions one of these names, start processes or a whole engine.
ENGINE_FOLDERS = ("bench", "end_to_end", "gpu", "cluster/bench", "cluster/serve", "cluster/system")
ENGINE_NAMES = re.compile(
    r"\b(Runner\(|EngineHere|engine_here|clockwork|subprocess|multiprocessing|in_processes|in_ranks|TokenizerPool|local_service\(|FakeService|fake_service\(|ProcessHost)"
)


# The files that take minutes, first among several workers: one that starts last leaves the others without work.
LONG_FOLDERS = ("cluster/serve", "end_to_end", "chaos", "cluster/bench", "cluster/engine")


@functools.cache
def place(path: Path) -> int:
    """Return a file's place in the order of the run: that of its folder, and the rest last."""
    folder = path.relative_to(Path(__file__).parent).parent.as_posix()
    return next((at for at, long in enumerate(LONG_FOLDERS) if folder == long), len(LONG_FOLDERS))


@functools.cache
def starts_an_engine(path: Path) -> bool:
    folder = path.relative_to(Path(__file__).parent).parent.as_posix()
    return folder.startswith(ENGINE_FOLDERS) or bool(ENGINE_NAMES.search(path.read_text()))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all 50 prompts for parity, not 6; also what is marked `full`")
    parser.addoption("--quick", action="store_true", help="no engines, no processes, nothing `slow`")


def pytest_ignore_collect(collection_path, config):
    """Do not import what `--quick` leaves out: importing Ray takes longer than most tests."""
    if config.getoption("--quick") and collection_path.suffix == ".py" and starts_an_engine(collection_path):
        return True
    return None


@pytest.fixture(scope="session", autouse=True)
def processes_that_start_warm(request):
    """Fork engines and tokenizers from processes that have imported torch and transformers once."""
    if sys.platform != "linux" or not any(
        "engine" in marks(item) and "gpu" not in marks(item) for item in request.session.items
    ):
        yield
        return
    from tests.support.warm_starts import warm_starts

    with warm_starts():
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once():
    """Read the machine's certificates for the first of thousands of HTTP clients. It takes a client 25 ms."""
    if not importlib.util.find_spec("httpcore2"):
        yield
        return
    import httpcore2

    read = httpcore2.default_ssl_context
    once = functools.cache(read)

    def context(**options):
        return read(**options) if {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys() else once(**options)

    with mock.patch.object(httpcore2, "default_ssl_context", context):
        yield


def marks(item):
    """Return the names of a test's marks. Its keywords hold the names of folders, too, above the checkout as well."""
    return {mark.name for mark in item.iter_markers()}


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: place(item.path))
    for item in items:
        if starts_an_engine(item.path):
            item.add_marker("engine")
    if config.getoption("--quick"):
        slow = [item for item in items if {"serve", "slow", "gpu"} & marks(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="one more engine of its kind: --full")
        for item in items:
            if "full" in marks(item):
                item.add_marker(skip)
