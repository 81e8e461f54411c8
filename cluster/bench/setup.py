"""Engine configuration and prompts of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from cluster.bench.output import Say
from cluster.bench.prompts import encode_prompts
from cluster.bench.scaled import scaled_pair
from cluster.convert import engine_config, fetch_weights, load_tokenizer, resolve_devices, visible_gpus
from cluster.planner.memory import sizes_in_8_bits
from cluster.system.temp_dirs import OwnedTempDir
from secateur.bench import TargetSize
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError, Problem
from secateur.prompts import BenchPrompt
from workers.config import EngineConfig
from workers.kernels import linear
from workers.models.checkpoint import Weights
from workers.models.readers import read_spec


@contextmanager
def scaled(args: EngineArgs, size: TargetSize | None, cache: Path | None, say: Say) -> Iterator[EngineArgs]:
    """Replace target and head by scaled ones of `size`; without `cache`, their files are deleted after the context."""
    if size is None:
        yield args
        return
    folder = OwnedTempDir()
    try:
        yield _with_scaled(args, size, cache or folder.path, say)
    finally:
        folder.remove()


def _with_scaled(args: EngineArgs, size: TargetSize, folder: Path, say: Say) -> EngineArgs:
    args = resolve_devices(args, num_gpus=visible_gpus())
    spec = args.speculative_config
    if spec is None or spec.method != "eagle3" or spec.model is None:
        raise ConfigError(Problem("--target-cost", "scales a target and its EAGLE-3 head; leave the drafter out"))
    name = args.dtype if args.dtype != "auto" else "float32" if args.device == "cpu" else "bfloat16"
    say(f"writing a target of {size} ({size.layer_parameters / 1e6:.0f} M parameters) unless {folder} holds it")
    try:
        pair = scaled_pair(
            Path(resolve_model(args.model)), Path(resolve_model(spec.model)), size, folder, getattr(torch, name)
        )
    except ValueError as error:
        raise ConfigError(Problem("--target-cost", str(error))) from error
    head = spec.model_copy(update={"model": str(pair.head)})
    return args.model_copy(update={"model": str(pair.target), "speculative_config": head})


class Workload(NamedTuple):
    """An engine's configuration and the token ids of its prompts."""

    config: EngineConfig
    prompts: list[list[int]]


def workload(args: EngineArgs, texts: Sequence[BenchPrompt], *, max_tokens: int, max_num_seqs: int) -> Workload:
    """Configure an engine no larger than the benchmark needs, without prefix caching. Raises ConfigError."""
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


def bytes_per_weight(config: EngineConfig) -> float:
    """Return the mean size of a weight of the target as our engine keeps it, which each step reads."""
    dtype = getattr(torch, config.dtype)
    weights = Weights(config.model_path, dtype)
    sizes = {name: math.prod(weights.shape(name)) for name in weights.names() if len(weights.shape(name)) == 2}
    if config.device != "cpu":
        kept = sizes_in_8_bits(config, config.model_path, read_spec(config.model_path), config.tensor_parallel_size)
        return sum(size * kept.get(name, dtype.itemsize) for name, size in sizes.items()) / sum(sizes.values())
    return sum(size * linear.bytes_per_weight(weights.get(name)) for name, size in sizes.items()) / sum(sizes.values())
