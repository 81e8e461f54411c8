"""`secateur plan` accepts and refuses what `secateur serve` would, on devices whose memory is simulated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.convert import engine_config
from cluster.planner.memory import model_shards
from cluster.planner.report import run
from drafter.workspace import draft_workspace
from secateur import cli
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.plan import HARDWARE, PlanRequest
from verifier.hidden_states import max_buffered_states
from verifier.workspace import target_workspace
from workers.config import EngineConfig
from workers.kv_cache import KVPool
from workers.kv_sizing import agree_on_pages
from workers.models.draft_methods import read_specs

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
CONTEXT_BYTES = 512 << 20
"""CUDA is taken to hold this for each process."""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of models and heads that consist of their config.json."""
    for name, widths in MODELS.items():
        shape = LLAMA | widths
        head = shape | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
        for folder, config in ((name, shape), (f"{name}-head", head)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "config.json").write_text(json.dumps(config))
    return tmp_path


def settings(models: Path, name: str, placement: str | None = None, nodes: int = 16, **more: Any) -> dict[str, Any]:
    spec = {"method": "eagle3", "model": str(models / f"{name}-head"), "num_speculative_tokens": nodes}
    drafter = {"speculative_config": spec | {"draft_placement": placement}} if placement else {"no_speculation": True}
    return {"model": str(models / name), "device": "cuda", **drafter, **more}


def served_pages(config: EngineConfig, memory_bytes: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the pages on which the ranks of a real engine would agree, null page included. Raises ValueError."""
    specs, shards = read_specs(config), model_shards(config)
    kv_type = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else torch.bfloat16
    slots, beside, held = [], [], []
    for rank in range(config.world_size):
        is_drafter = rank >= config.tensor_parallel_size
        layers = specs.draft.layers if is_drafter else specs.target  # type: ignore[union-attr]
        heads = math.ceil(layers.num_kv_heads / (config.draft_ranks if is_drafter else config.tensor_parallel_size))
        slot = KVPool.bytes_per_slot(layers.num_layers, heads, layers.head_dim, kv_type)
        if is_drafter:
            workspace, states = draft_workspace(config, specs.draft).total, 0
        else:
            taps = len(specs.draft.tap_layers) if specs.draft is not None else 0
            width = taps * specs.target.hidden_size
            slot += -(-2 * width // config.page_size)
            workspace = target_workspace(config, specs.target, num_taps=taps, state_width=width).total
            states = 2 * width * max_buffered_states(config)
        slots.append(slot)
        beside.append(workspace)
        held.append(CONTEXT_BYTES + shards[is_drafter].weight_bytes + states)

    def pages_of(rank: int) -> int:
        free = max(0, memory_bytes - sum(held[other] for other in config.ranks_on_device_of(rank)))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, memory_bytes))
        gathered = iter([slots, beside])
        agreed: list[int] = []
        world: Any = SimpleNamespace(
            config=config,
            rank=rank,
            device=torch.device("cuda"),
            gather_number=lambda _: next(gathered),
            agree_on_minimum=lambda fits: agreed.append(fits) or fits,
        )
        agree_on_pages(world, slots[rank], bytes_beside=beside[rank])
        return agreed[0]

    fits = min(pages_of(rank) for rank in range(config.world_size))
    return min(fits, 1 + config.max_num_seqs * config.pages_for(config.max_model_len))


FITTING = [
    ("8B", "h100", {"placement": "dedicated", "max_model_len": 8192}),
    ("8B", "h100", {"placement": "colocated", "max_model_len": 131072, "max_num_seqs": 16}),
    ("8B", "l4", {"max_model_len": 8192}),
    ("8B", "l4", {"placement": "colocated", "max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 512}),
    ("8B", "l4", {"placement": "dedicated", "max_model_len": 32768, "tensor_parallel_size": 2}),
    ("8B", "a100", {"placement": "colocated", "max_model_len": 131072, "kv_cache_dtype": "fp8", "nodes": 63}),
    ("70B", "h100", {"placement": "colocated", "max_model_len": 8192, "tensor_parallel_size": 4}),
    ("70B", "h200", {"placement": "dedicated", "max_model_len": 8192, "tensor_parallel_size": 2, "nodes": 4}),
]
TOO_LARGE = [
    ("8B", "l4", {"placement": "colocated", "max_model_len": 131072}),
    ("70B", "h100", {"max_model_len": 8192}),
    ("70B", "b200", {"placement": "dedicated", "max_model_len": 131072, "nodes": 4}),
    ("70B", "l40s", {"placement": "dedicated", "max_model_len": 8192, "tensor_parallel_size": 2}),
]


@pytest.mark.parametrize(("model", "card", "given"), FITTING)
def test_what_plan_accepts_is_served_with_as_many_pages(
    model: str, card: str, given: dict[str, Any], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware, args = HARDWARE[card], EngineArgs.load(settings(models, model, **given))
    planned = json.loads(run(args, PlanRequest(hardware=hardware, batches=(1,), context=256), as_json=True))
    served = served_pages(engine_config(args), 1e9 * hardware.memory_gb, monkeypatch)
    assert served == pytest.approx(planned["kv_pages"] + 1, rel=0.05)
    assert all(need["needed"] <= need["available"] for need in planned["memory"])
    assert planned["smallest_tensor_parallel_size"] <= given.get("tensor_parallel_size", 1)
    nodes = [line["on"]["nodes"] for line in planned["batches"] if line["on"]]
    assert all(count <= given.get("nodes", 16) for count in nodes)


@pytest.mark.parametrize(("model", "card", "given"), TOO_LARGE)
def test_what_plan_refuses_is_refused_by_the_engine(
    model: str, card: str, given: dict[str, Any], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware, args = HARDWARE[card], EngineArgs.load(settings(models, model, **given))
    with pytest.raises(ValueError, match="but one request of max_model_len") as refusal:
        served_pages(engine_config(args), 1e9 * hardware.memory_gb, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"(verifier|drafter) needs .* on each device; .*tensor_parallel_size"
    ) as told:
        run(args, PlanRequest(hardware=hardware, batches=(1,), context=256))
    assert str(refusal.value).partition("but one request")[2] in str(told.value)


def test_a_refusal_says_what_is_needed_what_is_there_and_which_size_fits(models: Path, capsys: Any) -> None:
    spec = json.dumps({"method": "eagle3", "model": str(models / "70B-head")})
    flags = ["--max-model-len", "8192", "--hardware", "h100"]
    assert cli.main(["plan", str(models / "70B"), "-sc", spec, *flags]) == 2
    told = capsys.readouterr().err
    first, second = told.splitlines()
    assert first.startswith("secateur: reading the configuration of ")
    assert "verifier needs 14" in second and "of 72 GB on each device; tensor_parallel_size=4 fits)" in second


def test_the_report_has_the_memory_and_the_smallest_size(models: Path) -> None:
    fields = settings(models, "8B", "dedicated", max_model_len=8192, tensor_parallel_size=4)
    text = run(EngineArgs.load(fields), PlanRequest(hardware=HARDWARE["h100"], batches=(1,)))
    assert "memory   verifier: " in text and "memory   drafter: " in text and "of 72 GB available" in text
    assert "smallest tensor_parallel_size that fits: 1" in text
    l4 = run(EngineArgs.load({**fields, "max_model_len": 32768}), PlanRequest(hardware=HARDWARE["l4"], batches=(1,)))
    assert "smallest tensor_parallel_size that fits: 2" in l4
