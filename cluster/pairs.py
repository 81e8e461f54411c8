"""Decides which models an engine runs, as far as the checkpoints tell it and not the command line.

A target and its drafter are a pair. A head in the format of speculators names its target, so it stands for the pair;
a drafter's config.json tells its method.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from cluster.convert import model_folder
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError, MissingModelError, Problem
from secateur.settings import WEIGHTS
from secateur.speculative import SpeculativeConfig, infer_method
from workers.models.config_json import read_json

logger = logging.getLogger(__name__)

KNOWN_HEADS = {
    "Qwen/Qwen3-4B": "AngelSlim/Qwen3-4B_eagle3",
    "Qwen/Qwen3-8B": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "Qwen/Qwen3-14B": "RedHatAI/Qwen3-14B-speculator.eagle3",
    "Qwen/Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
    "meta-llama/Llama-3.1-8B-Instruct": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    "meta-llama/Llama-3.3-70B-Instruct": "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
    "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE3-Vicuna1.3-13B",
    "openai/gpt-oss-20b": "RedHatAI/gpt-oss-20b-speculator.eagle3",
}
"""Published heads of published models, to be named to who serves the model alone. None was run here.

The pairs are those of the documents of their makers: vLLM's speculators (RedHatAI), SafeAILab (yuhuili), AngelSlim.
"""


def settled(args: EngineArgs) -> EngineArgs:
    """Return `args` with the target that a speculator as `model` is for, and with its drafter's method.

    Reads config.json of both, from the hub unless cached. Raises ConfigError.
    """
    args = _with_verifier(args)
    spec = args.speculative_config
    if spec is None:
        if args.model in KNOWN_HEADS and not args.no_speculation:
            logger.info("a published head drafts for %s; add %s", args.model, _line(KNOWN_HEADS[args.model]))
        return args
    if spec.is_method_given or WEIGHTS[spec.method] != "own" or spec.model is None:
        return args
    method = infer_method(str(model_folder(spec.model)))
    if method == spec.method:
        return args
    logger.info("%s drafts by method %r, by its config.json", spec.model, method)
    given = spec.model_dump(exclude_unset=True, exclude={"method"}) | {"method": method}
    return args.model_copy(update={"speculative_config": SpeculativeConfig.load(given)})


def settled_if_here(args: EngineArgs) -> EngineArgs:
    """Return what `settled` does, or `args` if a model cannot be read: in a cluster, other nodes may have it."""
    try:
        return settled(args)
    except MissingModelError:
        return args


def settled_as_placed(args: EngineArgs) -> EngineArgs:
    """Return what `settled` does. Raises ConfigError, also if it has a drafter for which no process was placed."""
    found = settled(args)
    if found.speculative_config is not None and args.speculative_config is None:
        told = (
            f"{args.model} is a draft head, and no process was placed for it, because the node that built the "
            f"application could not read it; write the model {found.model}, and {_line(args.model)}"
        )
        raise ConfigError(Problem("model", told))
    return found


def _with_verifier(args: EngineArgs) -> EngineArgs:
    """Return `args` with the pair, if its model is a speculator."""
    if args.speculative_config is not None or Path(resolve_model(args.model)).is_file():
        return args
    found = read_json(model_folder(args.model, args.revision) / "config.json").get("speculators_config")
    if found is None:
        return args
    verifier: Any = (found.get("verifier") or {}).get("name_or_path")
    line = _line(args.model)
    if not isinstance(verifier, str):
        told = f"{args.model} is a draft head that does not name its target; name the target, and add {line}"
        raise ConfigError(Problem("model", told))
    if args.revision is not None:
        told = f"is that of the target, and {args.model} is a draft head; write the model {verifier}, and {line}"
        raise ConfigError(Problem("revision", told))
    logger.info("%s is a draft head for %s; both are served", args.model, verifier)
    drafter = None if args.no_speculation else SpeculativeConfig.load({"model": args.model})
    return args.model_copy(
        update={"model": verifier, "speculative_config": drafter, "served_model_name": list(args.model_ids)}
    )


def _line(head: str) -> str:
    """Return what to add for a head to draft."""
    return f"--speculative-config '{json.dumps({'model': head})}'"
