"""vLLM's spellings of settings, and what replaces those of its settings that Secateur does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from secateur.errors import ConfigError, Problem
from secateur.settings import EngineSettings, Setting, settings_of

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNT = re.compile(r"(\d+)(?:\.(\d+))?([kKmMgGtT])")
_LORA = "adapters are not supported; merge the adapter into the weights"
_MULTIMODAL = "models are served as text models; leave it out"
_QUANTISED = "block FP8 and GGUF are read without a setting, other methods are not supported; leave it out"
_PARALLEL = "an engine has tensor parallelism alone (--tensor-parallel-size); for more throughput add replicas"
_REPLICAS = "add replicas: num_replicas of the Serve application, see the guide on Kubernetes"
_ALWAYS = "it is always so; leave it out"
_TLS = "HTTPS has a certificate and its key alone (--ssl-certfile, --ssl-keyfile); let a proxy do more"
_LOGS = "requests and their texts are never logged; leave it out"
_GRAPHS = "CUDA graphs are captured by themselves; --enforce-eager switches them off"
_SPECULATIVE = 'it is a key of --speculative-config, as in \'{"method": "eagle3", "model": ...}\''
_GRAMMAR = "llguidance needs no setting; of its settings --disable-additional-properties is there, and on"
_KV = "KV pages stay in the memory of their GPU; leave it out"
_TEMPLATE = "the model's own chat template is used; write it into the model's folder"
_PLUGIN = "code of others is not loaded into the service; leave it out"

ADVICE: dict[str, str] = {  # also the reference page reference/vllm.md
    "trust-remote-code": "code of a model's repository is never run; a model must be one that transformers knows",
    "quantization": _QUANTISED,
    "load-format": "the format follows from the files (safetensors or GGUF); leave it out",
    "download-dir": "set HF_HOME in the environment",
    "model-loader-extra-config": "weights are loaded in one way; leave it out",
    "hf-overrides": "edit config.json in a copy of the model",
    "hf-config-path": "keep config.json in the model's folder",
    "hf-token": "set HF_TOKEN in the environment",
    "config-format": "configurations have the format of Hugging Face; leave it out",
    "code-revision": "code of a model's repository is never run; leave it out",
    "tokenizer-revision": "--revision applies to the model and its tokenizer",
    "tokenizer-mode": "the tokenizer's kind follows from its files; leave it out",
    "skip-tokenizer-init": "the service always has its tokenizer; leave it out",
    "model-impl": "the decoder follows from the model; leave it out",
    "runner": "models generate text; leave it out",
    "convert": "models generate text; leave it out",
    "task": "models generate text; leave it out",
    "rope-scaling": "write it into config.json in a copy of the model",
    "rope-theta": "write it into config.json in a copy of the model",
    "max-seq-len-to-capture": _GRAPHS,
    "max-logprobs": "a request may ask for 20 log-probabilities; leave it out",
    "logprobs-mode": "log-probabilities are the target's own, before temperature (raw_logprobs); leave it out",
    "disable-sliding-window": "attention is the model's own; leave it out",
    "disable-cascade-attn": "there is no cascade attention; leave it out",
    "override-generation-config": "--generation-config none uses OpenAI's defaults; requests set the others",
    "enable-sleep-mode": "there is no sleep mode; scale the replicas instead",
    "logits-processors": _PLUGIN,
    "block-size": "write --page-size",
    "num-gpu-blocks-override": "write --num-pages",
    "kv-cache-memory-bytes": "write --num-pages, or --gpu-memory-utilization",
    "calculate-kv-scales": "the scale of --kv-cache-dtype fp8 is 1; leave it out",
    "swap-space": _KV,
    "cpu-offload-gb": _KV,
    "kv-transfer-config": _KV,
    "kv-events-config": _KV,
    "kv-offloading-size": _KV,
    "ec-transfer-config": _MULTIMODAL,
    "prefix-caching-hash-algo": "prefixes are compared by their tokens; leave it out",
    "pipeline-parallel-size": _PARALLEL,
    "data-parallel-size": _REPLICAS,
    "data-parallel-rank": _REPLICAS,
    "data-parallel-size-local": _REPLICAS,
    "data-parallel-address": _REPLICAS,
    "data-parallel-backend": _REPLICAS,
    "data-parallel-hybrid-lb": _REPLICAS,
    "data-parallel-external-lb": _REPLICAS,
    "api-server-count": _REPLICAS,
    "enable-expert-parallel": _PARALLEL,
    "decode-context-parallel-size": _PARALLEL,
    "prefill-context-parallel-size": _PARALLEL,
    "distributed-executor-backend": "Ray places the processes, and nothing else does; leave it out",
    "nnodes": "start a Ray cluster and set RAY_ADDRESS",
    "node-rank": "start a Ray cluster and set RAY_ADDRESS",
    "master-addr": "start a Ray cluster and set RAY_ADDRESS",
    "master-port": "start a Ray cluster and set RAY_ADDRESS",
    "headless": "start a Ray cluster and set RAY_ADDRESS",
    "worker-cls": _PLUGIN,
    "disable-custom-all-reduce": "ranks sum through NCCL only; leave it out",
    "ray-workers-use-nsight": "there are no traces of this kind; `secateur bench step` measures the parts of a step",
    "enable-chunked-prefill": _ALWAYS,
    "max-num-partial-prefills": "the scheduler shares a step's tokens among prompts by itself; leave it out",
    "max-long-partial-prefills": "the scheduler shares a step's tokens among prompts by itself; leave it out",
    "long-prefill-token-threshold": "the scheduler shares a step's tokens among prompts by itself; leave it out",
    "scheduler-cls": _PLUGIN,
    "async-scheduling": "tokens are sent while the next step computes; there is nothing to switch on",
    "num-scheduler-steps": "there are no multi-step schedules; leave it out",
    "scheduler-delay-factor": "new requests are not held back; leave it out",
    "stream-interval": "a stream has a chunk per step of the engine; leave it out",
    "num-lookahead-slots": "slots for drafts follow from num_speculative_tokens; leave it out",
    "preemption-mode": "preempted requests are computed again; leave it out",
    "speculative-model": _SPECULATIVE,
    "num-speculative-tokens": _SPECULATIVE,
    "speculative-draft-tensor-parallel-size": "write draft_tensor_parallel_size in --speculative-config",
    "speculative-max-model-len": "the drafter follows every sequence of the target; leave it out",
    "speculative-disable-by-batch-size": "speculative_tree_prune 'auto' shrinks trees where they do not pay",
    "ngram-prompt-lookup-max": "write prompt_lookup_max in --speculative-config",
    "ngram-prompt-lookup-min": "write prompt_lookup_min in --speculative-config",
    "spec-decoding-acceptance-method": "write acceptance ('coupled' or 'rejection') in --speculative-config",
    "compilation-config": _GRAPHS,
    "optimization-level": _GRAPHS,
    "cudagraph-capture-sizes": _GRAPHS,
    "max-cudagraph-capture-size": _GRAPHS,
    "attention-backend": "write --kernels",
    "attention-config": "write --kernels",
    "moe-backend": "write --kernels",
    "structured-outputs-config": _GRAMMAR,
    "guided-decoding-backend": _GRAMMAR,
    "reasoning-config": "write --reasoning-parser",
    "enable-reasoning": "write --reasoning-parser",
    "reasoning-parser-plugin": _PLUGIN,
    "enable-auto-tool-choice": _ALWAYS,
    "tool-parser-plugin": _PLUGIN,
    "tool-server": "tools are run by clients; leave it out",
    "exclude-tools-when-tool-choice-none": _ALWAYS,
    "chat-template": _TEMPLATE,
    "chat-template-content-format": _TEMPLATE,
    "trust-request-chat-template": "requests cannot bring a template; chat_template_kwargs sets its variables",
    "default-chat-template-kwargs": "set chat_template_kwargs in each request",
    "response-role": "answers have the role 'assistant'; leave it out",
    "enable-prompt-tokens-details": _ALWAYS,
    "enable-server-load-tracking": _ALWAYS,
    "enable-request-id-headers": _ALWAYS,
    "enable-per-request-metrics": "set return_speculative_stats in each request, or read /metrics",
    "disable-log-requests": _LOGS,
    "enable-log-requests": _LOGS,
    "enable-log-outputs": _LOGS,
    "enable-log-deltas": _LOGS,
    "max-log-len": _LOGS,
    "disable-log-stats": "numbers are in /metrics, not in the log; leave it out",
    "uvicorn-log-level": _LOGS,
    "disable-uvicorn-access-log": _LOGS,
    "disable-access-log-for-endpoints": _LOGS,
    "log-config-file": "logs follow Ray's settings; leave it out",
    "log-error-stack": "errors of the service are logged with their stacks; leave it out",
    "otlp-traces-endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment",
    "collect-detailed-traces": "`secateur bench step` measures the parts of a step",
    "show-hidden-metrics-for-version": "no metric is hidden; leave it out",
    "disable-fastapi-docs": "/docs and /openapi.json hold no secret; let the proxy forward only what clients need",
    "disable-frontend-multiprocessing": "the front and the engine are processes of their own; leave it out",
    "middleware": _PLUGIN,
    "uds": "the service listens on --host and --port",
    "h11-max-incomplete-event-size": "a request's headers have a fixed limit; leave it out",
    "h11-max-header-count": "a request's headers have a fixed limit; leave it out",
    "ssl-ca-certs": _TLS,
    "ssl-cert-reqs": _TLS,
    "ssl-ciphers": _TLS,
    "enable-ssl-refresh": "a renewed certificate takes effect with the next start; leave it out",
    "limit-mm-per-prompt": _MULTIMODAL,
    "allowed-local-media-path": _MULTIMODAL,
    "allowed-media-domains": _MULTIMODAL,
    "mm-processor-kwargs": _MULTIMODAL,
    "disable-mm-preprocessor-cache": _MULTIMODAL,
    "language-model-only": _MULTIMODAL,
    "lora-modules": _LORA,
    "max-loras": _LORA,
    "max-lora-rank": _LORA,
    "max-cpu-loras": _LORA,
    "fully-sharded-loras": _LORA,
    "pooler-config": "models generate text; leave it out",
}
SPECULATIVE_ADVICE: dict[str, str] = {
    "disable_by_batch_size": "speculative_tree_prune 'auto' shrinks trees where they do not pay; leave it out",
    "quantization": "the drafter's format follows from its files; leave it out",
    "revision": "give the drafter as a folder of that revision",
    "code_revision": ADVICE["code-revision"],
    "enforce_eager": "--enforce-eager holds for the drafter too; leave it out",
    "attention_backend": "--kernels holds for the drafter too; leave it out",
    "moe_backend": "--kernels holds for the drafter too; leave it out",
    "parallel_drafting": "trees grow level by level; leave it out",
    "disable_padded_drafter_batch": "the drafter's batches are not padded; leave it out",
    "rejection_sample_method": "write acceptance ('coupled' or 'rejection') and rejection_method",
    "use_local_argmax_reduction": "shards exchange their best token by themselves; leave it out",
}
"""The same for keys of vLLM's speculative configuration."""
_FAMILIES = {"enable-lora": _LORA, "lora-": _LORA, "mm-": _MULTIMODAL}
"""Settings by the beginning of their name."""
SHORT_NAMES = {
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-asc": "api-server-count",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-q": "quantization",
}
"""vLLM's short options that Secateur does not have, by their long names; -O1 to -O3 are treated likewise."""


def advice_about(name: str) -> str | None:
    """Return what to use instead of a setting of vLLM, or None if vLLM has no such setting or Secateur has it too.

    `name` is an option such as --block-size, -pp or --no-enable-chunked-prefill, or a key such as block_size.
    """
    if name.startswith("-O"):
        return _GRAPHS
    long = SHORT_NAMES.get(name, name).removeprefix("--").replace("_", "-")
    if long.removeprefix("no-") == "enable-chunked-prefill" and long.startswith("no-"):
        return "prompts are always computed in chunks; leave it out, and raise --max-num-batched-tokens"
    for known in (long, long.removeprefix("no-")):
        if known in ADVICE:
            return ADVICE[known]
        if found := [text for start, text in _FAMILIES.items() if known.startswith(start)]:
            return found[0]
    return None


def read_count(text: str) -> int:
    """Return a number such as 4096, 32k (32,000), 32K (32,768) or 1.5M (1,572,864). Raises ValueError."""
    if re.fullmatch(r"-?\d+", text.strip()):
        return int(text)
    if (match := _COUNT.fullmatch(text.strip())) is None:
        raise ValueError(f"must be a whole number such as 4096, 32k (32000) or 32K (32768) (got {text!r})")
    whole, fraction, unit = match[1], match[2] or "", match[3]
    number, rest = divmod(int(whole + fraction) * _UNITS[unit], 10 ** len(fraction))
    if rest:
        raise ValueError(f"must be a whole number; {text} is not")
    return number


def in_our_words(settings: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return settings, whose keys have underscores, without vLLM's spellings.

    `no_KEY: true` becomes `KEY: false`, `speculative_config.KEY` a key of it, text that is JSON an object or a list,
    32k a number and half a dtype. Raises ConfigError, also for vLLM's settings that are not among our `fields`.
    """
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in settings.items():
        name, dot, inner = key.partition(".")
        positive = name.removeprefix("no_")
        try:
            if dot and name == "speculative_config":
                _add_key(found, settings, inner, value)
            elif name not in fields and positive in fields and type(value) is bool:
                _put(found, settings, positive, not value)
            elif name not in fields and (advice := advice_about(name)):
                problems.append(Problem(key, f"is a setting of vLLM that Secateur does not have: {advice}"))
            elif key != "speculative_config" or key not in found:
                found[key] = _READERS[key](value) if key in _READERS else value
        except ValueError as error:
            problems += error.problems if isinstance(error, ConfigError) else [Problem(key, str(error))]
    if problems:
        raise ConfigError(*problems)
    return found


def _add_key(found: dict[str, Any], settings: Mapping[str, Any], key: str, value: Any) -> None:
    base = found.get("speculative_config", _read_object(settings.get("speculative_config", {})))
    name = key.replace("-", "_")
    if not isinstance(base, dict) or base.get(name, value) != value:
        raise ValueError("contradicts speculative_config; keep one of the two")
    found["speculative_config"] = {**base, name: value}


def _put(found: dict[str, Any], settings: Mapping[str, Any], key: str, value: bool) -> None:
    if settings.get(key, value) != value:
        raise ValueError(f"contradicts {key}: {str(settings[key]).lower()}; keep one of the two")
    found[key] = value


def _read_length(value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "auto":
        raise ValueError("must be a number; leave it out to have the model's own limit")
    return read_count(value) if isinstance(value, str) else value


def _read_object(value: Any) -> Any:
    """Return the value, or the object that its text describes. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}; quote it with '...'") from None
    if not isinstance(read, dict):
        raise ValueError(f"must be a JSON object, got {value}")
    return read


def _read_list(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
    return value


def _read_names(value: Any) -> Any:
    read = _read_list(value)
    return read[0] if isinstance(read, list) and len(read) == 1 else read


def _reader(setting: Setting) -> Callable[[Any], Any]:
    if setting.flag.has_unit:
        return _read_length
    if list[str] in setting.kinds:
        return _read_list
    names = setting.flag.vllm_values
    return lambda value: names.get(value, value) if isinstance(value, str) else value


_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: _reader(setting) for name, setting in settings_of(EngineSettings).items()},
    "speculative_config": _read_object,
    "served_model_name": _read_names,
}
