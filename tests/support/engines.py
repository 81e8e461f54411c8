"""Configurations of engines in real processes with the bundled pair, its prompts and their reference outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from cluster.bench.runner import GeneratedAnswer, GenerationJob, Runner  # noqa: F401  # the tests' door to running engines
from cluster.bench.setup import encode_prompts
from cluster.text.tokenizer import Tokenizer
from secateur.prompts import BUNDLED_PROMPTS, read_prompts
from workers.comm.ipc import Submit, TokenChunk
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "secateur" / "bundled"


def ask(runner: Runner, submit: Submit) -> list[TokenChunk]:
    """Send a request under an id of its own; return all that the engine tells."""
    client = runner._engine.client

    async def told() -> list[TokenChunk]:
        return [chunk async for chunk in client.submit(replace(submit, id=client.new_id()))]

    return runner._loop.run_until_complete(told())


@cache
def prompts(count: int = 50) -> list[list[int]]:
    """Return the bundled held-out prompts as token ids, with the chat template applied to chat prompts."""
    return encode_prompts(Tokenizer(str(BUNDLED / "target")), read_prompts(BUNDLED_PROMPTS, count))


def transformers_greedy(some_prompts: list[list[int]], num_tokens: int, device: str = "cpu") -> list[list[int]]:
    """Return transformers' greedy continuations by the bundled target in float32, without stopping at EOS."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32).to(device)
    texts = []
    for prompt in some_prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=3,
            eos_token_id=None,
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def bundled(
    tree: TreeConfig | None = None, *, method: str = "eagle3", tp: int = 1, draft_tp: int = 1, **options: object
) -> EngineConfig:
    """Return the configuration of an engine with the bundled target; tree None = no speculation."""
    draft = None
    if tree is not None:
        folder = BUNDLED / ("eagle3" if method == "eagle3" else "draft")
        draft = DraftConfig(method=method, model_path=str(folder), tensor_parallel_size=draft_tp, tree=tree)  # type: ignore[arg-type]
    settings: dict[str, object] = {"max_model_len": 512, "max_num_seqs": 16, "step_timeout_s": 120.0}
    return EngineConfig(  # type: ignore[arg-type]
        model_path=str(BUNDLED / "target"), tensor_parallel_size=tp, draft=draft, **settings | options
    )


CHAIN = TreeConfig(kind="chain", num_speculative_tokens=5)
DYNAMIC = TreeConfig(kind="dynamic", num_speculative_tokens=16)
AUTO = TreeConfig(kind="dynamic", num_speculative_tokens=16, prune=PruneConfig(auto=True))
STATIC_PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))
STATIC = TreeConfig(kind="static", num_speculative_tokens=len(STATIC_PATHS), static_paths=STATIC_PATHS)


def pruned(min_prob: float = 0.0, path_prob: float = 0.0) -> TreeConfig:
    return TreeConfig(
        kind="dynamic", num_speculative_tokens=16, prune=PruneConfig(min_prob=min_prob, path_prob=path_prob)
    )
