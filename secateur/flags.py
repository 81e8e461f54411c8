"""Flags that commands share, and how flags, a `--config` file and defaults become EngineArgs.

Precedence: flag, then file, then default. The pruning flags are merged into the speculative configuration; two flags
of one command line that contradict each other are an error.
"""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import contextlib
import functools
import inspect
import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from secateur.config import BUNDLED_TARGET, DEFAULT_SPECULATION, EngineArgs, read_yaml
from secateur.errors import ConfigError, Problem
from secateur.schema import normalise_keys


class Device(StrEnum):
    """Values of --device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DefaultSampling(StrEnum):
    """Values of --generation-config."""

    auto = "auto"
    none = "none"


class KernelSet(StrEnum):
    """Values of --kernels."""

    auto = "auto"
    torch = "torch"
    triton = "triton"


class Dtype(StrEnum):
    """Values of --dtype."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _flag(kind: Any, *names: str, help: str, **extra: Any) -> Any:
    # EngineArgs alone checks ranges, so that every error has one wording; flags have no bounds or defaults.
    return Annotated[kind | None, typer.Option(*names, help=help, **extra)]


PRUNING = {
    "speculative_tree_prune_min_prob": "Do not expand a node whose best next token is less probable than this.",
    "speculative_tree_prune_path_prob": "Do not expand a node whose path from the root is less probable than this.",
    "speculative_tree_prune_threshold": "One number for both thresholds.",
}

ENGINE_FLAGS: dict[str, Any] = {
    "config": _flag(Path, "--config", help="YAML file of these settings; flags override it.", metavar="FILE"),
    "tokenizer": _flag(str, "--tokenizer", help="Folder or id [the model's own]."),
    "generation_config": _flag(
        DefaultSampling,
        "--generation-config",
        help="Default sampling parameters: the model's generation_config.json (auto) or OpenAI's (none) [auto].",
    ),
    "revision": _flag(str, "--revision", help="Branch, tag or commit of a Hugging Face id."),
    "tensor_parallel_size": _flag(int, "--tensor-parallel-size", "-tp", help="Devices of the verifier [1]."),
    "speculative_config": _flag(
        str,
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='How to draft, e.g. \'{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 16}\'.',
    ),
    **{
        name: _flag(float, "--" + name.replace("_", "-"), help=text + " 0 is off [0].", metavar="X")
        for name, text in PRUNING.items()
    },
    "no_speculation": _flag(bool, "--no-speculation", help="Decode without a drafter."),
    "max_model_len": _flag(int, "--max-model-len", help="Prompt plus output, in tokens [the model's]."),
    "max_num_seqs": _flag(int, "--max-num-seqs", help="Requests running at once [64]."),
    "max_num_batched_tokens": _flag(int, "--max-num-batched-tokens", help="Tokens per step [2048]."),
    "page_size": _flag(int, "--page-size", help="Tokens per KV page [16]."),
    "num_pages": _flag(int, "--num-pages", help="KV pages, of which one is never used [as many as fit]."),
    "enable_prefix_caching": _flag(
        bool,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse the KV cache of common prompt prefixes [on].",
    ),
    "gpu_memory_utilization": _flag(float, "--gpu-memory-utilization", help="Share of each GPU to use [0.9]."),
    "hang_timeout": _flag(
        float, "--hang-timeout", help="Seconds after which a rank that does not get on is replaced; 0 = never [10]."
    ),
    "dtype": _flag(Dtype, "--dtype", help="[auto: float32 on CPU, the checkpoint's on CUDA]"),
    "device": _flag(Device, "--device", help="[auto]"),
    "kernels": _flag(KernelSet, "--kernels", help="[auto: triton on CUDA, torch on CPU]"),
    "enforce_eager": _flag(bool, "--enforce-eager", help="Do not capture CUDA graphs."),
}
SERVER_FLAGS: dict[str, Any] = {
    "seed": _flag(int, "--seed", help="Seed for requests that do not set one."),
    "served_model_name": _flag(str, "--served-model-name", help="The name clients use [the model's]."),
    "host": _flag(str, "--host", help="Address to listen on [127.0.0.1]."),
    "port": _flag(int, "--port", help="Port to listen on; 0 takes a free one [8000]."),
    "api_key": _flag(
        str,
        "--api-key",
        help="Require this key [the environment's SECATEUR_API_KEY, else none]. `ps` shows it to every user of this "
        "machine; the environment and --api-key-file are not shown.",
    ),
    "api_key_file": _flag(
        str,
        "--api-key-file",
        metavar="FILE",
        help="Require one of the keys in this file, one per line. Changes apply to the next request.",
    ),
    "allowed_origins": _flag(
        list[str],
        "--allowed-origins",
        metavar="ORIGIN",
        help="Let scripts of pages from here use the service, e.g. https://app.example; '*' is all. Repeat the flag, "
        "or write a JSON list [none].",
    ),
    "allowed_methods": _flag(
        list[str], "--allowed-methods", metavar="METHOD", help="HTTP methods of such scripts, likewise [*]."
    ),
    "allowed_headers": _flag(
        list[str], "--allowed-headers", metavar="HEADER", help="Request headers of such scripts, likewise [*]."
    ),
    "allow_credentials": _flag(bool, "--allow-credentials", help="Let browsers send cookies with such requests."),
    "reasoning_parser": _flag(
        str,
        "--reasoning-parser",
        metavar="FORMAT",
        help="How the model writes reasoning: auto (as its chat template has it), think (<think>...</think>) or none.",
    ),
    "tool_call_parser": _flag(
        str,
        "--tool-call-parser",
        metavar="FORMAT",
        help="How the model writes tool calls: auto (as its chat template teaches), hermes, llama3_json or mistral.",
    ),
    "root_path": _flag(
        str, "--root-path", metavar="PATH", help="The prefix under which clients see the service, e.g. /llm."
    ),
    "enable_tokenizer_info_endpoint": _flag(
        bool,
        "--enable-tokenizer-info-endpoint",
        help="Answer /tokenizer_info with the tokenizer's configuration and chat template.",
    ),
}


# The service checks all ranges; these bounds catch common mistakes before a service starts.
SAMPLING_FLAGS: dict[str, Any] = {
    "max_tokens": _flag(int, "--max-tokens", help="The most tokens to generate [complete: 16].", min=1),
    "temperature": _flag(float, "--temperature", help="0 is greedy [the model's own, else 1.0].", min=0.0),
    "top_p": _flag(float, "--top-p", help="Keep the most probable tokens up to this mass."),
    "top_k": _flag(int, "--top-k", help="Keep this many of the most probable tokens; 0 keeps all.", min=-1),
    "stop": _flag(list[str], "--stop", help="Stop before this text; repeat the flag for several.", metavar="TEXT"),
    "presence_penalty": _flag(
        float, "--presence-penalty", help="Subtracted from the logits of tokens that occurred [0]."
    ),
    "frequency_penalty": _flag(
        float, "--frequency-penalty", help="The same, multiplied by the number of occurrences [0]."
    ),
    "repetition_penalty": _flag(
        float,
        "--repetition-penalty",
        help="Values above 1 make tokens that occurred less likely [the model's own, else 1].",
    ),
    "seed": _flag(int, "--seed", help="The same seed gives the same text."),
}

# `latency` and `throughput` share these; `secateur.bench` holds ranges and defaults.
SPEED_FLAGS: dict[str, Any] = {
    "contestants": _flag(
        str,
        "--contestants",
        help="Of off, chain, static, dynamic, auto, draft_model (ours); generate, generate_2_threads, assisted, "
        "prompt_lookup (transformers) [all of these that make sense]; vllm, vllm_eagle3, vllm_ngram, llamacpp, "
        "openvino (peers, from `make peers`).",
        metavar="NAME,...",
    ),
    "batches": _flag(list[int], "--batches", help="Requests at a time.", metavar="N ..."),
    "temperatures": _flag(list[float], "--temperatures", help="[0 1]", metavar="T ..."),
    "nodes": _flag(int, "--nodes", help="Draft nodes per step [16]."),
    "chain": _flag(int, "--chain", help="Draft tokens per chain, ours and the peers' [5]."),
    "num_prompts": _flag(int, "--num-prompts", help="Requests in a turn; at least a batch [latency 2, throughput 1]."),
    "max_tokens": _flag(int, "--max-tokens", help="Tokens per answer [48]."),
    "rounds": _flag(int, "--rounds", help="Rounds per contestant; the report gives medians [latency 6, throughput 8]."),
    "peer_threads": _flag(int, "--peer-threads", help="Threads with which each peer computes [2]."),
}

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class ManyNumbers(TyperCommand):
    """A command whose repeatable options also take several numbers at once: `--nodes 4 8` is `--nodes 4 --nodes 8`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat an option's name before each further number, then parse as usual."""
        repeatable = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        spread: list[str] = []
        option = None  # the repeatable option that the current numbers belong to
        for arg in args:
            if option is None or not _is_number(arg):
                option = arg if arg in repeatable else None
            elif spread[-1] != option:
                spread.append(option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def with_engine_flags(*, server: bool) -> Decorator:
    """Give a command the engine flags, as a dict argument `engine` with None for flags that were not given."""
    return _with_flags("engine", {**ENGINE_FLAGS, **(SERVER_FLAGS if server else {})})


def with_sampling_flags() -> Decorator:
    """Give a command the sampling flags, as a dict argument `sampling`."""
    return _with_flags("sampling", SAMPLING_FLAGS)


def with_speed_flags() -> Decorator:
    """Give a command the flags of `latency` and `throughput`, as a dict argument `options`."""
    return _with_flags("options", SPEED_FLAGS)


def _with_flags(group: str, flags: dict[str, Any]) -> Decorator:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            return command(**{group: {name: given.pop(name) for name in flags}}, **given)

        signature = inspect.signature(command)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name != group
        ]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in flags.items()
        ]
        run.__signature__ = signature.replace(parameters=own + more)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in own + more}
        return run

    return decorate


def engine_args_from(flags: dict[str, Any]) -> EngineArgs:
    """Return EngineArgs from flags (None = not given), including `config`. Raises ConfigError."""
    given = {name: _plain(value) for name, value in flags.items() if value is not None}
    settings = normalise_keys(read_yaml(given.pop("config"))) if "config" in given else {}
    pruning = {name: given.pop(name) for name in PRUNING if name in given}
    if "speculative_config" in given:
        given["speculative_config"] = _add(pruning, _parse_json(given["speculative_config"]))
        settings.pop("no_speculation", None)
    if given.get("no_speculation"):
        settings.pop("speculative_config", None)
    settings.update(given)
    if pruning and "speculative_config" not in given:
        settings["speculative_config"] = _override(pruning, _speculation_of(settings, next(iter(pruning))))
    return EngineArgs.load(settings)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [item for text in value for item in _listed(text)]
    return value.value if isinstance(value, StrEnum) else value


def _listed(text: str) -> list[Any]:
    """Return the items of a JSON list, which vLLM's flags take, or the text itself."""
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(items := json.loads(text), list):
            return items
    return [text]


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(Problem("--speculative-config", f"not JSON: {error}; quote it with '...'")) from None
    if not isinstance(value, dict):
        raise ConfigError(Problem("--speculative-config", f"must be a JSON object, got {text}"))
    return normalise_keys(value)


def _speculation_of(settings: dict[str, Any], flag: str) -> dict[str, Any]:
    """Return the file's speculative configuration, or the model's default, to merge pruning flags into."""
    if settings.get("no_speculation"):
        raise ConfigError(Problem(_spelt(flag), "contradicts --no-speculation; keep one of the two"))
    if isinstance(found := settings.get("speculative_config"), dict):
        return normalise_keys(found)
    if default := DEFAULT_SPECULATION.get(settings.get("model", BUNDLED_TARGET)):
        return dict(default)
    raise ConfigError(Problem(_spelt(flag), "prunes a draft tree, but nothing drafts: add --speculative-config"))


def _add(pruning: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    """Add pruning flags to --speculative-config. Neither overrides the other, so they must agree."""
    for name, value in pruning.items():
        if speculation.get(name, value) != value:
            other = f"{name}={speculation[name]} in --speculative-config"
            raise ConfigError(Problem(_spelt(name), f"{value} contradicts {other}; keep one"))
    return {**speculation, **pruning}


def _override(pruning: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    """Override a file's configuration by pruning flags, after expanding its single threshold into both."""
    base = dict(speculation)
    if (both := base.pop("speculative_tree_prune_threshold", None)) is not None:
        base = {"speculative_tree_prune_min_prob": both, "speculative_tree_prune_path_prob": both} | base
    if "speculative_tree_prune_threshold" in pruning:
        base = {name: value for name, value in base.items() if name not in PRUNING}
    return {**base, **pruning}


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-")
