"""Flags that commands share, and how flags, a `--config` file and defaults become EngineArgs.

Precedence: flag, then file, then default. Flags for single keys of the speculative configuration (pruning, and
`--speculative-config.KEY`) are merged into it; two flags of one command line that contradict each other are an error.
"""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import contextlib
import functools
import inspect
import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secateur.errors import ConfigError, Problem
from secateur.vllm_names import in_our_words

if TYPE_CHECKING:  # pydantic takes longer to import than --help may take
    from secateur.config import EngineArgs


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


class SchedulingPolicy(StrEnum):
    """Values of --scheduling-policy."""

    fcfs = "fcfs"
    priority = "priority"


class Dtype(StrEnum):
    """Values of --dtype."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    half = "half"
    float = "float"


class KvCacheDtype(StrEnum):
    """Values of --kv-cache-dtype."""

    auto = "auto"
    fp8 = "fp8"
    fp8_e4m3 = "fp8_e4m3"


def _flag(kind: Any, *names: str, help: str, **extra: Any) -> Any:
    # EngineArgs alone checks ranges, so that every error has one wording; flags have no bounds or defaults.
    return Annotated[kind | None, typer.Option(*names, help=help, **extra)]


_model = functools.partial(_flag, rich_help_panel="Model")
_speculation = functools.partial(_flag, rich_help_panel="Speculation")
_limit = functools.partial(_flag, rich_help_panel="Limits")
_serving = functools.partial(_flag, rich_help_panel="Serving")
_sampling = functools.partial(_flag, rich_help_panel="Sampling")

SPECULATIVE_KEYS = "--speculative-config-keys"
"""A hidden flag: `--speculative-config.KEY VALUE` arrives as an object of these keys, see `secateur.cli.command`."""


PRUNING = {
    "speculative_tree_prune_min_prob": "Do not expand a node whose best next token is less probable than this.",
    "speculative_tree_prune_path_prob": "Do not expand a node whose path from the root is less probable than this.",
    "speculative_tree_prune_threshold": "One number for both thresholds.",
}

ENGINE_FLAGS: dict[str, Any] = {
    "config": _flag(Path, "--config", help="YAML file of these settings; flags override it.", metavar="FILE"),
    "tokenizer": _model(str, "--tokenizer", help="Folder or id [the model's own]."),
    "generation_config": _model(
        DefaultSampling,
        "--generation-config",
        help="Default sampling parameters: the model's generation_config.json (auto) or OpenAI's (none) [auto].",
    ),
    "revision": _model(str, "--revision", help="Branch, tag or commit of a Hugging Face id."),
    "tensor_parallel_size": _model(int, "--tensor-parallel-size", "-tp", help="Devices of the verifier [1]."),
    "speculative_config": _speculation(
        str,
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='How to draft, e.g. \'{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 16}\'. '
        "--speculative-config.KEY VALUE sets one key.",
    ),
    **{
        name: _speculation(float, "--" + name.replace("_", "-"), help=text + " 0 is off [0].", metavar="X")
        for name, text in PRUNING.items()
    },
    "speculative_config_keys": _speculation(str, SPECULATIVE_KEYS, hidden=True, help="See SPECULATIVE_KEYS."),
    "no_speculation": _speculation(bool, "--no-speculation", help="Decode without a drafter."),
    "max_model_len": _limit(
        str,
        "--max-model-len",
        metavar="N",
        help="Prompt plus output, in tokens, such as 8192, 32k or 32K [the model's].",
    ),
    "max_num_seqs": _limit(int, "--max-num-seqs", help="Requests running at once [64]."),
    "max_num_batched_tokens": _limit(str, "--max-num-batched-tokens", metavar="N", help="Tokens per step [2048]."),
    "page_size": _limit(int, "--page-size", help="Tokens per KV page [16]."),
    "num_pages": _limit(int, "--num-pages", help="KV pages, of which one is never used [as many as fit]."),
    "enable_prefix_caching": _limit(
        bool,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse the KV cache of common prompt prefixes [on].",
    ),
    "scheduling_policy": _limit(
        SchedulingPolicy,
        "--scheduling-policy",
        help="Serve requests in order of arrival, or by their `priority`, lower numbers first [fcfs].",
    ),
    "gpu_memory_utilization": _limit(float, "--gpu-memory-utilization", help="Share of each GPU to use [0.9]."),
    "hang_timeout": _limit(
        float, "--hang-timeout", help="Seconds after which a rank that does not get on is replaced; 0 = never [10]."
    ),
    "startup_timeout": _limit(
        float,
        "--startup-timeout",
        help="Seconds in which an engine must load its weights, compile and capture CUDA graphs [3600].",
    ),
    "standby": _limit(
        bool,
        "--standby/--no-standby",
        help="Keep a process from which lost ranks are forked, and so are back in seconds [on].",
    ),
    "dtype": _model(Dtype, "--dtype", help="[auto: float32 on CPU, the checkpoint's on CUDA]"),
    "kv_cache_dtype": _model(
        KvCacheDtype,
        "--kv-cache-dtype",
        help="Keys and values in the model's dtype, or in 8 bits (fp8, which is e4m3) [auto].",
    ),
    "device": _model(Device, "--device", help="[auto]"),
    "kernels": _model(KernelSet, "--kernels", help="[auto: triton on CUDA, torch on CPU]"),
    "enforce_eager": _model(bool, "--enforce-eager", help="Do not capture CUDA graphs."),
    "threads": _model(
        int,
        "--threads",
        help="Threads of a verifier rank on CPU [1; in bfloat16 all cores, shared by the ranks].",
    ),
}
SERVER_FLAGS: dict[str, Any] = {
    "seed": _serving(int, "--seed", help="Seed for requests that do not set one."),
    "served_model_name": _serving(
        list[str],
        "--served-model-name",
        metavar="NAME ...",
        help="The name that clients use, or several, of which answers have the first [the model's].",
    ),
    "host": _serving(str, "--host", help="Address to listen on [127.0.0.1]."),
    "port": _serving(int, "--port", help="Port to listen on; 0 takes a free one [8000]."),
    "shutdown_timeout": _serving(
        float, "--shutdown-timeout", help="Seconds that running answers may still take when the service stops [20]."
    ),
    "api_key": _serving(
        str,
        "--api-key",
        help="Require this key [the environment's SECATEUR_API_KEY, else none]. `ps` shows it to every user of this "
        "machine; the environment and --api-key-file are not shown.",
    ),
    "api_key_file": _serving(
        str,
        "--api-key-file",
        metavar="FILE",
        help="Require one of the keys in this file, one per line, each with settings if you like: KEY name=team-a "
        "requests-per-minute=60 tokens-per-minute=20000. Changes apply to the next request.",
    ),
    "ssl_certfile": _serving(
        str, "--ssl-certfile", metavar="FILE", help="Speak HTTPS with this certificate (PEM) [plain HTTP]."
    ),
    "ssl_keyfile": _serving(
        str, "--ssl-keyfile", metavar="FILE", help="The key of --ssl-certfile (PEM without a password)."
    ),
    "batch_dir": _serving(
        str,
        "--batch-dir",
        metavar="DIR",
        help="Serve /v1/files and /v1/batches, and keep them in this folder [none].",
    ),
    "allowed_origins": _serving(
        list[str],
        "--allowed-origins",
        metavar="ORIGIN",
        help="Let scripts of pages from here use the service, e.g. https://app.example; '*' is all. Repeat the flag, "
        "or write a JSON list [none].",
    ),
    "allowed_methods": _serving(
        list[str], "--allowed-methods", metavar="METHOD", help="HTTP methods of such scripts, likewise [*]."
    ),
    "allowed_headers": _serving(
        list[str], "--allowed-headers", metavar="HEADER", help="Request headers of such scripts, likewise [*]."
    ),
    "allow_credentials": _serving(bool, "--allow-credentials", help="Let browsers send cookies with such requests."),
    "reasoning_parser": _serving(
        str,
        "--reasoning-parser",
        metavar="FORMAT",
        help="How the model writes reasoning: auto (as its chat template has it), think (<think>...</think>) or none.",
    ),
    "tool_call_parser": _serving(
        str,
        "--tool-call-parser",
        metavar="FORMAT",
        help="How the model writes tool calls: auto (as its chat template teaches), hermes, llama3_json or mistral.",
    ),
    "root_path": _serving(
        str, "--root-path", metavar="PATH", help="The prefix under which clients see the service, e.g. /llm."
    ),
    "enable_tokenizer_info_endpoint": _serving(
        bool,
        "--enable-tokenizer-info-endpoint",
        help="Answer /tokenizer_info with the tokenizer's configuration and chat template.",
    ),
    "enable_force_include_usage": _serving(
        bool,
        "--enable-force-include-usage",
        help="Send the usage so far in every chunk of every stream, whatever a request's stream_options say.",
    ),
    "return_tokens_as_token_ids": _serving(
        bool,
        "--return-tokens-as-token-ids",
        help="Write the tokens of log probabilities as token_id:123, unless a request says otherwise.",
    ),
    "unsupported_content": _serving(
        str,
        "--unsupported-content",
        metavar="KIND",
        help="What becomes of images and other parts of messages that are no text, unless a request says otherwise: "
        "error, or placeholder, a text that says so [error].",
    ),
    "disable_additional_properties": _serving(
        bool,
        "--disable-additional-properties/--no-disable-additional-properties",
        help="Where a JSON schema says nothing of them, let objects have no properties that it does not name [on].",
    ),
}


# The service checks all ranges; these bounds catch common mistakes before a service starts.
SAMPLING_FLAGS: dict[str, Any] = {
    "max_tokens": _sampling(int, "--max-tokens", help="The most tokens to generate [complete: 16].", min=1),
    "temperature": _sampling(float, "--temperature", help="0 is greedy [the model's own, else 1.0].", min=0.0),
    "top_p": _sampling(float, "--top-p", help="Keep the most probable tokens up to this mass."),
    "top_k": _sampling(int, "--top-k", help="Keep this many of the most probable tokens; 0 keeps all.", min=-1),
    "stop": _sampling(list[str], "--stop", help="Stop before this text; repeat the flag for several.", metavar="TEXT"),
    "presence_penalty": _sampling(
        float, "--presence-penalty", help="Subtracted from the logits of tokens that occurred [0]."
    ),
    "frequency_penalty": _sampling(
        float, "--frequency-penalty", help="The same, multiplied by the number of occurrences [0]."
    ),
    "repetition_penalty": _sampling(
        float,
        "--repetition-penalty",
        help="Values above 1 make tokens that occurred less likely [the model's own, else 1].",
    ),
    "seed": _sampling(int, "--seed", help="The same seed gives the same text, near-ties apart."),
}

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def with_engine_flags(*, server: bool) -> Decorator:
    """Give a command the engine flags, as a dict argument `engine` with None for flags that were not given."""
    return with_flags("engine", {**ENGINE_FLAGS, **(SERVER_FLAGS if server else {})})


def with_sampling_flags() -> Decorator:
    """Give a command the sampling flags, as a dict argument `sampling`."""
    return with_flags("sampling", SAMPLING_FLAGS)


def with_flags(group: str, flags: dict[str, Any]) -> Decorator:
    """Give a command these flags (annotations by name), as a dict argument named `group`."""

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


def engine_args_from(flags: dict[str, Any]) -> "EngineArgs":
    """Return EngineArgs from flags (None = not given), including `config`. Raises ConfigError."""
    from secateur.config import EngineArgs, read_yaml
    from secateur.schema import normalise_keys

    given = {name: _plain(value) for name, value in flags.items() if value is not None}
    settings: dict[str, Any] = {}
    if "config" in given:
        settings = in_our_words(normalise_keys(read_yaml(given.pop("config"))), EngineArgs.model_fields)
    keys = _single_keys(given)
    given = in_our_words(given, EngineArgs.model_fields)
    if "speculative_config" in given:
        given["speculative_config"] = _add(keys, normalise_keys(given["speculative_config"]))
        settings.pop("no_speculation", None)
    if given.get("no_speculation"):
        settings.pop("speculative_config", None)
    settings.update(given)
    if keys and "speculative_config" not in given:
        settings["speculative_config"] = _override(keys, _speculation_of(settings, next(iter(keys))))
    return EngineArgs.load(settings)


def _single_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Take the flags for single keys of the speculative configuration out of the given ones."""
    pruning = {name: given.pop(name) for name in PRUNING if name in given}
    return _add(pruning, json.loads(given.pop("speculative_config_keys", "{}")))


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


def _speculation_of(settings: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the file's speculative configuration, or the model's default, to merge single keys into."""
    from secateur.config import BUNDLED_TARGET, DEFAULT_SPECULATION
    from secateur.schema import normalise_keys

    if settings.get("no_speculation"):
        raise ConfigError(Problem(_spelt(key), "contradicts --no-speculation; keep one of the two"))
    if isinstance(found := settings.get("speculative_config"), dict):
        return normalise_keys(found)
    if default := DEFAULT_SPECULATION.get(settings.get("model", BUNDLED_TARGET)):
        return dict(default)
    if key in PRUNING:
        raise ConfigError(Problem(_spelt(key), "prunes a draft tree, but nothing drafts: add --speculative-config"))
    return {}


def _add(keys: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    """Add single keys to --speculative-config. Neither overrides the other, so they must agree."""
    for name, value in keys.items():
        if speculation.get(name, value) != value:
            other = f"{name}={speculation[name]} in --speculative-config"
            raise ConfigError(Problem(_spelt(name), f"{value} contradicts {other}; keep one"))
    return {**speculation, **keys}


def _override(keys: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    """Override a file's configuration by single keys, after expanding its single threshold into both.

    Another method or model is another drafter: of the file's keys, none stays then.
    """
    if {"method", "model"} & keys.keys():
        return keys
    base = dict(speculation)
    if (both := base.pop("speculative_tree_prune_threshold", None)) is not None:
        base = {"speculative_tree_prune_min_prob": both, "speculative_tree_prune_path_prob": both} | base
    if "speculative_tree_prune_threshold" in keys:
        base = {name: value for name, value in base.items() if name not in PRUNING}
    return {**base, **keys}


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-") if name in PRUNING else f"--speculative-config.{name}"
