"""The table of sizes: which published models fit on which GPUs, from the planner and the models' shapes alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cluster.planner.report import run
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.plan import HARDWARE, PlanRequest

CONTEXT = 8192
"""Tokens of the longest request."""
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip
_QWEN3 = _LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
}  # fmt: skip


def _shape(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return base | sizes | {"num_attention_heads": heads}


MODELS = {
    "Llama-3.1-8B": _shape(_LLAMA, 4096, 14336, 32, 32),
    "Qwen3-8B": _shape(_QWEN3, 4096, 12288, 36, 32),
    "Qwen3-32B": _shape(_QWEN3, 5120, 25600, 64, 64),
    "Llama-3.3-70B": _shape(_LLAMA, 8192, 28672, 80, 64),
}
"""Shapes as their config.json have them. The head of each is an EAGLE-3 layer of the same width."""


class Fit(NamedTuple):
    """An engine that fits. tokens: in the KV cache."""

    model: str
    gpu: str
    tensor_parallel_size: int
    placement: str
    tokens: int

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of an engine."""
        return self.tensor_parallel_size + (self.placement == "dedicated")


def sizes() -> Iterator[Fit]:
    """Yield the smallest engine of each model, GPU and placement, up to eight verifier ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for model, shape in MODELS.items():
            target, head = Path(folder, model), Path(folder, f"{model}-head")
            draft = shape | {
                "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
                "draft_vocab_size": 32000,
            }  # fmt: skip
            for path, config in ((target, shape), (head, draft)):
                path.mkdir()
                (path / "config.json").write_text(json.dumps(config))
            for gpu in HARDWARE:
                for placement in ("colocated", "dedicated"):
                    if found := _smallest(model, target, head, gpu, placement):
                        yield found


def _smallest(model: str, target: Path, head: Path, gpu: str, placement: str) -> Fit | None:
    request = PlanRequest(hardware=HARDWARE[gpu], batches=(1,), context=512)
    for ranks in (1, 2, 4, 8):
        spec = {"method": "eagle3", "model": str(head), "draft_placement": placement}
        settings = {"model": str(target), "device": "cuda", "max_model_len": CONTEXT, "tensor_parallel_size": ranks}
        try:
            found = json.loads(run(EngineArgs.load(settings | {"speculative_config": spec}), request, as_json=True))
        except ConfigError:  # one request does not fit
            continue
        return Fit(model, gpu, ranks, placement, 16 * found["kv_pages"])
    return None


def page() -> str:
    """Return the page."""
    rows = [
        f"| {size.model} | {size.gpu.upper()} ({HARDWARE[size.gpu].memory_gb:g} GB) | {size.tensor_parallel_size} "
        f"| {size.placement} | {size.num_gpus} | {size.tokens:,} | {min(64, size.tokens // CONTEXT)} |"
        for size in sizes()
    ]
    parts = [
        "# Sizing",
        f"The smallest engine of each model and GPU in bfloat16, with an EAGLE-3 head and up to {CONTEXT:,} tokens in "
        "a request, as `secateur plan` computes it from the models' shapes: the drafter on the verifier's GPUs "
        "(`colocated`) or on one of its own (`dedicated`). The last column is how many of the 64 requests that run at "
        f"once may have {CONTEXT:,} tokens each. These are predictions: none of these models has run on a GPU yet.",
        "\n".join(
            [
                "| model | GPU | tensor_parallel_size | draft_placement | GPUs | KV tokens | longest requests |",
                "| --- | --- | --- | --- | --- | --- | --- |",
                *rows,
            ]
        ),
        "`--kv-cache-dtype fp8` doubles the tokens, and a smaller `--max-num-seqs` leaves more memory to them. "
        "[Planning](../guides/planning.md) explains the command.",
    ]
    return "\n\n".join(parts) + "\n"
