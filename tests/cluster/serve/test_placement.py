"""Engine configuration, rank placements, bundles and the plan, before any process starts."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import secateur
from cluster.convert import engine_config
from cluster.engine.engine_client import EngineClient
from cluster.engine.rank_placement import num_bundles, rank_placements, worker_env
from cluster.local_service import build_service
from cluster.planner.memory import tensor_shapes
from cluster.planner.report import run
from cluster.planner.topology import bytes_text
from cluster.serve.placement import group_bundles
from cluster.text.tokenizer import Tokenizer
from cluster.text.tokenizer_pool import TokenizerPool
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.plan import PlanRequest
from tests.support import checkpoints
from workers.config import DraftConfig, EngineConfig

BUNDLED = Path(secateur.__file__).parent / "bundled"


def config(tp: int = 1, draft: int = 1, placement: str = "dedicated", device: str = "cuda") -> EngineConfig:
    drafter = DraftConfig(
        method="eagle3",
        model_path="head",
        tensor_parallel_size=draft,
        placement=placement,  # type: ignore[arg-type]
    )
    return EngineConfig(model_path="model", tensor_parallel_size=tp, device=device, draft=drafter)  # type: ignore[arg-type]


def args(**fields: Any) -> EngineArgs:
    return EngineArgs.load(fields)


def plan(given: EngineArgs) -> str:
    """Return the output of `secateur plan` without predictions."""
    return run(given, PlanRequest())


def draft_args(**spec: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "eagle3", "model": "bundled:eagle3", **spec}}


# Seats


def test_dedicated_ranks_have_a_device_each() -> None:
    found = rank_placements(config(tp=2, draft=1))
    assert [(placement.role, placement.bundle, placement.num_gpus) for placement in found] == [
        ("verifier 0", 0, 1.0),
        ("verifier 1", 1, 1.0),
        ("drafter 0", 2, 1.0),
    ]
    assert not any(placement.is_shared for placement in found)


def test_a_colocated_drafter_shares_its_verifier_s_device() -> None:
    found = rank_placements(config(tp=2, draft=1, placement="colocated"))
    assert [(placement.bundle, placement.num_gpus, placement.is_shared) for placement in found] == [
        (0, 0.5, True),
        (1, 1.0, False),
        (0, 0.5, True),
    ]


@pytest.mark.parametrize(("tp", "draft"), [(1, 1), (2, 1), (2, 2), (4, 4)])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_no_device_is_placed_twice(tp: int, draft: int, placement: str) -> None:
    engine = config(tp, draft, placement)
    per_bundle = [0.0] * num_bundles(engine)
    for rank in rank_placements(engine):
        per_bundle[rank.bundle] += rank.num_gpus
    assert all(0 < total <= 1 for total in per_bundle)
    assert num_bundles(engine) == (tp + draft if placement == "dedicated" else tp)


@pytest.mark.parametrize(
    ("placement", "link", "is_through_host"),
    [
        ("colocated", "auto", True),
        ("dedicated", "auto", False),
        ("dedicated", "nccl", False),
        ("dedicated", "host", True),
    ],
)
def test_nccl_never_gets_two_ranks_on_one_device_or_a_link_through_the_host(
    placement: str, link: str, is_through_host: bool
) -> None:
    for tp, draft in ((1, 1), (2, 1), (2, 2)):
        engine = config(tp, draft, placement)
        assert engine.draft is not None
        assert replace(engine, draft=replace(engine.draft, link=link)).has_host_link == is_through_host


def test_a_worker_on_cpu_gets_one_thread() -> None:
    assert worker_env(config(device="cpu"))["OMP_NUM_THREADS"] == "1"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other habits")
def test_a_worker_on_cpu_keeps_the_memory_it_has_freed() -> None:
    # As attention does in each layer: gather some MiB, and let go of them.
    program = """if True:
        import resource, torch
        pool, slots = torch.ones(4096, 256), torch.arange(3200)
        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        def faults_of(times):
            before = faults()
            for _ in range(times): pool.index_select(0, slots).relu()
            return faults() - before
        faults_of(8)
        print(min(faults_of(64) for _ in range(5)))  # a kernel that moves pages makes faults of its own
    """
    environment = os.environ | worker_env(config(device="cpu"))
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(told.stdout) < 64


GRANTS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMALL_BLOCKS = pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="this glibc cannot ask for them")


@pytest.mark.skipif(not GRANTS.exists() or "[never]" in GRANTS.read_text(), reason="no huge pages are granted here")
@pytest.mark.parametrize("size", [1 << 24, pytest.param(1 << 17, marks=SMALL_BLOCKS)])
def test_a_worker_on_cpu_keeps_its_weights_in_huge_pages(size: int) -> None:
    weights = f"[torch.ones({size}) for _ in range({(1 << 24) // size})]"
    program = f"import torch; weights = {weights}; print(open('/proc/self/smaps_rollup').read())"
    environment = os.environ | worker_env(config(device="cpu"))
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    kib = next(int(line.split()[1]) for line in told.stdout.splitlines() if line.startswith("AnonHugePages"))
    assert kib >= 32 << 10, "of 64 MiB"


# Bundles


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (8192, "8.19 kB"), (1_099_650_000_000, "1.1 TB")],
)
def test_bytes_are_formatted_with_three_digits(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_the_replica_lives_in_the_first_bundle() -> None:
    assert group_bundles(config(tp=1), replica_cpus=0.5) == [{"GPU": 1.0, "CPU": 1.5}, {"GPU": 1.0, "CPU": 1.0}]


def test_every_bundle_requests_the_accelerator_type() -> None:
    assert all("accelerator_type:H100" in bundle for bundle in group_bundles(config(), accelerator_type="H100"))


def test_a_cpu_engine_requests_no_gpu_and_little_cpu() -> None:
    bundles = group_bundles(config(tp=2, device="cpu"))
    assert not any("GPU" in bundle for bundle in bundles)
    assert sum(bundle["CPU"] for bundle in bundles) < 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"GPU": 1, "CPU": 1}], "has 1 bundles, the engine needs 2"),
        ([{"GPU": 1}, {"GPU": 1}], "the first one also holds the replica"),
        ([{"GPU": 1, "CPU": 1}, {"CPU": 1}], "every bundle needs GPU: 1"),
    ],
)
def test_bundles_that_do_not_fit_are_refused(given: list[dict[str, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group_bundles(config(), given=given)


# Arguments


def test_a_service_logs_the_models_sampling_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = checkpoints.write_model(tmp_path, "qwen3")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    taken = args(model=str(model), no_speculation=True)
    tokenizer = Tokenizer(str(BUNDLED / "target"))
    tokenizer_pool = TokenizerPool(tokenizer)  # not started
    with caplog.at_level(logging.INFO, "cluster"):
        service = build_service(taken, engine_config(taken), EngineClient(), tokenizer, tokenizer_pool, replica="local")
    assert "default sampling parameters of the model: temperature=0.6, top_k=20 " in caplog.text
    assert service.sampling_defaults == {"temperature": 0.6, "top_k": 20}


def test_a_service_has_the_settings_of_its_arguments() -> None:
    tokenizer = Tokenizer(str(BUNDLED / "target"))
    flags = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True, "stream_interval": 5}
    for given, is_on in ((flags, True), ({}, False)):
        taken = args(**given)
        pool = TokenizerPool(tokenizer)  # not started
        service = build_service(taken, engine_config(taken), EngineClient(), tokenizer, pool, replica="local")
        assert (service.forces_usage, service.names_tokens_by_id) == (is_on, is_on)
        assert service.stream_interval == (5 if is_on else 1)
        assert service.model_root == "bundled:target"


def test_models_of_the_wrong_kind_are_refused_before_slow_imports() -> None:
    """Reading a model imports torch and transformers, which takes many seconds."""
    wrong = [
        ("mtp", None, "must natively support multi-token prediction"),
        ("eagle", "bundled:eagle3", "is an EAGLE-3 head: write method 'eagle3'"),
        ("eagle3", "bundled:target", "is not an EAGLE-3 head"),
        ("draft_model", "bundled:eagle3", "is an EAGLE-3 draft head, not a model"),
    ]
    code = f"""
import sys
from cluster.convert import check_local_models, engine_config
from secateur.config import EngineArgs
from secateur.errors import ConfigError

for method, model, says in {wrong!r}:
    spec = {{"method": method}} | ({{"model": model}} if model else {{}})
    args = EngineArgs.load({{"device": "cpu", "speculative_config": spec}})
    for check in (check_local_models, engine_config):
        try:
            check(args)
        except ConfigError as error:
            assert says in str(error), error
        else:
            sys.exit(f"{{check}} accepts {{method}} with {{model}}")
sys.exit(" ".join({{"ray", "torch", "transformers"}} & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# The plan


def test_the_plan_names_every_rank_and_bundle() -> None:
    text = plan(args(tensor_parallel_size=2, device="cuda", **draft_args(draft_tensor_parallel_size=2)))
    for role in ("verifier 0", "verifier 1", "drafter 0", "drafter 1"):
        assert role in text
    assert "bundles  4, STRICT_PACK" in text


def test_the_plan_counts_the_existing_weights() -> None:
    shapes = tensor_shapes(BUNDLED / "target")
    items = 0
    for shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        items += count
    text = plan(args())
    assert f"{items * 4 / 1e6:.3g} MB" in text
    assert "weights are counted in float32" in text and "counted in" not in plan(args(dtype="bfloat16"))
