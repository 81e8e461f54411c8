"""Engine configuration, prompts and header of a benchmark."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from cluster.convert import engine_config, fetch_weights, load_tokenizer, visible_gpus
from cluster.errors import PromptError
from cluster.pairs import settled
from cluster.text.tokenizer import Tokenizer
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.prompts import BenchPrompt
from workers.config import EngineConfig


class Workload(NamedTuple):
    """An engine's configuration and the token ids of its prompts."""

    config: EngineConfig
    prompts: list[list[int]]


def workload(args: EngineArgs, texts: Sequence[BenchPrompt], *, max_tokens: int, max_num_seqs: int) -> Workload:
    """Configure an engine no larger than the benchmark needs, without prefix caching. Raises ConfigError."""
    args = settled(args)
    config = engine_config(args, num_gpus=visible_gpus())
    prompts = encode_prompts(load_tokenizer(args, config), texts)
    longest, limit = max(map(len, prompts)) + max_tokens, config.max_model_len
    if longest > limit:
        raise ConfigError(
            Problem("--max-tokens", f"the longest request takes {longest} tokens, max_model_len is {limit}")
        )
    fetch_weights(args, config)
    config = replace(config, max_model_len=longest, max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    # By default each engine takes all the memory of its GPU; a benchmark may run several on one.
    pages = 1 + max_num_seqs * config.pages_for(longest)
    return Workload(replace(config, num_pages=pages), prompts)


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    """Tokenize prompts; conversations use the chat template. Raises ConfigError for invalid prompts."""
    try:
        return [
            tokenizer.encode_chat(prompt.messages) if prompt.messages else tokenizer.encode(prompt.text or "")
            for prompt in prompts
        ]
    except PromptError as error:
        raise ConfigError(Problem("--prompts", str(error))) from error


def about(
    args: EngineArgs, config: EngineConfig, settings: Mapping[str, object], notes: Sequence[str]
) -> dict[str, object]:
    """Return a report's header: settings, versions and hardware."""
    import transformers  # takes seconds

    spec = args.speculative_config
    return {
        "hardware": hardware(config),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": args.model,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "speculative_config": spec.model_dump(exclude_unset=True) if spec else None,
        **settings,
        "notes": list(notes),
    }


def hardware(config: EngineConfig) -> str:
    """Describe the hardware that the engine runs on."""
    if config.device == "cpu":
        threads = "one thread per process" if config.threads == 1 else f"{config.threads} threads per verifier rank"
        return f"{os.cpu_count()} CPU cores, {platform.machine()}, {threads}"
    shared = ", drafter on the verifier's" if config.draft and config.draft.placement == "colocated" else ""
    count = config.tensor_parallel_size + (0 if shared else config.draft_ranks)
    return f"{count} x {torch.cuda.get_device_name()}{shared}"


def device_mark(config: EngineConfig) -> str | None:
    """Return the device's part of the file name; none on CPU."""
    return "cuda" if config.device == "cuda" else None
