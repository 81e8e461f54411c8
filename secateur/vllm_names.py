"""vLLM's spellings of settings, and what replaces those settings of vLLM and SGLang that Secateur does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from secateur.errors import ConfigError, Problem
from secateur.settings import EngineSettings, Setting, settings_of

_OBJECT = """as in '{"method": "ngram"}'"""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNT = re.compile(r"(\d+)(?:\.(\d+))?([kKmMgGtT])")
NOTHING = "there is nothing to set here; leave it out"
_LORA = "adapters are not supported; merge the adapter into the weights"
_MULTIMODAL = "models are served as text models; leave it out"
_QUANTISED = "block FP8 and GGUF are read without a setting, other methods are not supported; leave it out"
_REMOTE_CODE = "code of a repository is never run, and a model must be one that transformers knows; leave it out"
_GRAPHS = "CUDA graphs are captured in any case (--enforce-eager switches them off); leave it out"
_GRAMMAR = "llguidance needs no setting but --disable-additional-properties, which is on; leave it out"
_PARALLEL = "an engine has tensor parallelism only; write --tensor-parallel-size, and add replicas for more throughput"
_REPLICAS = "set num_replicas in the Serve application, as in the guide on Kubernetes"
_KERNELS = "--kernels holds for the drafter too; leave it out"
_BATCH_SIZE = "speculative_tree_prune 'auto' shrinks trees where they do not pay; leave it out"

_NAMES_BY_ADVICE = {
    **{
        f"write --{name.replace('_', '-')}": " ".join(setting.flag.vllm_names)
        for name, setting in settings_of(EngineSettings).items()
    },
    _LORA: "lora-modules max-loras max-lora-rank max-cpu-loras fully-sharded-loras",
    _MULTIMODAL: "ec-transfer-config limit-mm-per-prompt allowed-local-media-path allowed-media-domains "
    "mm-processor-kwargs disable-mm-preprocessor-cache language-model-only",
    "models generate text; leave it out": "runner convert task pooler-config",
    _QUANTISED: "quantization",
    _REMOTE_CODE: "trust-remote-code code-revision",
    "code of others is not loaded into the service; leave it out": "logits-processors worker-cls scheduler-cls "
    "reasoning-parser-plugin tool-parser-plugin middleware",
    "edit config.json in a copy of the model": "hf-overrides hf-config-path rope-scaling rope-theta",
    "set HF_HOME in the environment": "download-dir",
    "set HF_TOKEN in the environment": "hf-token",
    "--revision applies to the model and its tokenizer": "tokenizer-revision",
    "the model's own chat template is used; write it into the model's folder": "chat-template "
    "chat-template-content-format",
    "set chat_template_kwargs in each request": "default-chat-template-kwargs trust-request-chat-template",
    "--generation-config none uses OpenAI's defaults; requests set the others": "override-generation-config",
    "a request may ask for 20 log-probabilities; leave it out": "max-logprobs",
    "log-probabilities are the target's own, before temperature (raw_logprobs); leave it out": "logprobs-mode",
    _GRAMMAR: "structured-outputs-config guided-decoding-backend",
    "tools are run by clients; leave it out": "tool-server",
    "write --num-pages, or --gpu-memory-utilization": "kv-cache-memory-bytes",
    "the scale of --kv-cache-dtype fp8 is 1; leave it out": "calculate-kv-scales",
    "KV pages stay in the memory of their GPU; leave it out": "swap-space cpu-offload-gb kv-transfer-config "
    "kv-events-config kv-offloading-size",
    "there is no sleep mode; scale the replicas instead": "enable-sleep-mode",
    _PARALLEL: "pipeline-parallel-size enable-expert-parallel decode-context-parallel-size "
    "prefill-context-parallel-size enable-eplb eplb-config",
    _REPLICAS: "data-parallel-size "
    "data-parallel-rank data-parallel-size-local data-parallel-address data-parallel-backend data-parallel-hybrid-lb "
    "data-parallel-external-lb api-server-count",
    "start a Ray cluster and set RAY_ADDRESS": "nnodes node-rank master-addr master-port headless",
    "ranks sum through NCCL only; leave it out": "disable-custom-all-reduce",
    _GRAPHS: "max-seq-len-to-capture compilation-config optimization-level cudagraph-capture-sizes "
    "max-cudagraph-capture-size",
    "it is always so; leave it out": "enable-chunked-prefill enable-auto-tool-choice "
    "exclude-tools-when-tool-choice-none enable-prompt-tokens-details enable-server-load-tracking "
    "enable-request-id-headers",
    'write model in --speculative-config, as in \'{"method": "eagle3", "model": ...}\'': "speculative-model",
    "write num_speculative_tokens in --speculative-config": "num-speculative-tokens",
    "write draft_tensor_parallel_size in --speculative-config": "speculative-draft-tensor-parallel-size",
    "the drafter follows every sequence of the target; leave it out": "speculative-max-model-len",
    _BATCH_SIZE: "speculative-disable-by-batch-size",
    "write prompt_lookup_max in --speculative-config": "ngram-prompt-lookup-max",
    "write prompt_lookup_min in --speculative-config": "ngram-prompt-lookup-min",
    "write acceptance ('coupled' or 'rejection') in --speculative-config": "spec-decoding-acceptance-method",
    "set return_speculative_stats in each request, or read /metrics": "enable-per-request-metrics",
    "write --log-level": "uvicorn-log-level",
    "requests and their texts are never logged; leave it out": "disable-log-requests enable-log-requests "
    "enable-log-outputs enable-log-deltas max-log-len disable-uvicorn-access-log "
    "disable-access-log-for-endpoints",
    "logs follow Ray's settings; leave it out": "log-config-file",
    "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment": "otlp-traces-endpoint",
    "`secateur bench step` measures the parts of a step": "collect-detailed-traces ray-workers-use-nsight",
    "/docs and /openapi.json hold no secret; let the proxy forward only what clients need": "disable-fastapi-docs",
    "the service listens on --host and --port": "uds",
    "HTTPS has a certificate and its key alone (--ssl-certfile, --ssl-keyfile); let a proxy do more": "ssl-ca-certs "
    "ssl-cert-reqs ssl-ciphers",
    "a renewed certificate takes effect with the next start; leave it out": "enable-ssl-refresh",
    NOTHING: "load-format model-loader-extra-config config-format tokenizer-mode skip-tokenizer-init model-impl "
    "disable-sliding-window disable-cascade-attn prefix-caching-hash-algo distributed-executor-backend "
    "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold async-scheduling "
    "num-scheduler-steps scheduler-delay-factor num-lookahead-slots preemption-mode "
    "response-role disable-log-stats log-error-stack show-hidden-metrics-for-version "
    "use-v2-block-manager performance-mode kv-cache-metrics enable-flashinfer-autotune gdn-prefill-backend "
    "disable-frontend-multiprocessing h11-max-incomplete-event-size h11-max-header-count",
}
ADVICE = {name: text for text, names in _NAMES_BY_ADVICE.items() for name in names.split()}
"""What to do instead of each of vLLM's settings; also the reference page reference/vllm.md."""
_SGLANG_NAMES_BY_ADVICE = {
    "write the model as an argument, `secateur serve MODEL`": "model-path",
    "write --tokenizer": "tokenizer-path",
    "write --tensor-parallel-size (-tp)": "tp tp-size",
    _REPLICAS: "dp dp-size",
    _PARALLEL: "ep ep-size pp pp-size enable-dp-attention moe-a2a-backend moe-dense-tp-size",
    "write --gpu-memory-utilization": "mem-fraction-static",
    "write --max-model-len": "context-length",
    "write --max-num-seqs": "max-running-requests",
    "write --num-pages": "max-total-tokens",
    "write --max-num-batched-tokens": "chunked-prefill-size max-prefill-tokens",
    "write --no-enable-prefix-caching": "disable-radix-cache",
    "write --scheduling-policy": "schedule-policy",
    "write --generation-config": "sampling-defaults",
    "write --seed": "random-seed",
    "write --hang-timeout": "watchdog-timeout",
    "write --kernels": "sampling-backend mm-attention-backend",
    "write --enforce-eager": "disable-cuda-graph",
    _GRAPHS: "cuda-graph-max-bs cuda-graph-bs disable-cuda-graph-padding enable-torch-compile torch-compile-max-bs",
    _GRAMMAR: "grammar-backend",
    "write method in --speculative-config": "speculative-algorithm speculative-algo",
    "write model in --speculative-config": "speculative-draft-model-path speculative-draft",
    "write speculative_tree_max_depth in --speculative-config": "speculative-num-steps",
    "write speculative_tree_max_children in --speculative-config": "speculative-eagle-topk",
    "write num_speculative_tokens in --speculative-config": "speculative-num-draft-tokens",
    "start a Ray cluster and set RAY_ADDRESS": "dist-init-addr",
    "set CUDA_VISIBLE_DEVICES in the environment": "base-gpu-id gpu-id-step",
    "/metrics is always there; leave it out": "enable-metrics",
    "requests and their texts are never logged; leave it out": "log-requests log-requests-level",
    "edit config.json in a copy of the model": "json-model-override-args",
    "models generate text; leave it out": "is-embedding",
    NOTHING: "skip-server-warmup enable-p2p-check enable-mixed-chunk schedule-conservativeness",
}
SGLANG_ADVICE = {name: text for text, names in _SGLANG_NAMES_BY_ADVICE.items() for name in names.split()}
"""The same for SGLang's options, without those that vLLM has too."""
SPECULATIVE_ADVICE: dict[str, str] = {
    "disable_by_batch_size": _BATCH_SIZE,
    "revision": "give the drafter as a folder of that revision",
    "code_revision": _REMOTE_CODE,
    "enforce_eager": "--enforce-eager holds for the drafter too; leave it out",
    "attention_backend": _KERNELS,
    "moe_backend": _KERNELS,
    "rejection_sample_method": "write acceptance ('coupled' or 'rejection') and rejection_method",
    "quantization": NOTHING,
    "parallel_drafting": NOTHING,
    "disable_padded_drafter_batch": NOTHING,
    "use_local_argmax_reduction": NOTHING,
}
"""The same for keys of vLLM's speculative configuration."""
NEEDLESS = frozenset(
    "--enable-chunked-prefill --enable-auto-tool-choice --exclude-tools-when-tool-choice-none "
    "--enable-prompt-tokens-details --enable-server-load-tracking --enable-request-id-headers --disable-log-requests "
    "--disable-uvicorn-access-log".split()
)
"""Flags of vLLM that ask for what is so in any case: on a command line they get a warning."""
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


def project_of(name: str) -> str:
    """Return whose option it is that `advice_about` knows."""
    return "SGLang" if name.removeprefix("--") in SGLANG_ADVICE else "vLLM"


def advice_about(name: str) -> str | None:
    """Return what to use instead of a setting of vLLM or SGLang, or None where neither has it or Secateur has it too.

    `name` is an option such as --block-size, -pp or --no-enable-chunked-prefill, or a key such as block_size.
    """
    if name.startswith("-O"):
        return _GRAPHS
    long = SHORT_NAMES.get(name, name).removeprefix("--").replace("_", "-")
    if long.removeprefix("no-") == "enable-chunked-prefill" and long.startswith("no-"):
        return "prompts are always computed in chunks; leave it out, and raise --max-num-batched-tokens"
    for known in (long, long.removeprefix("no-")):
        if (advice := ADVICE.get(known) or SGLANG_ADVICE.get(known)) is not None:
            return advice
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
        raise ValueError(f"not JSON ({error}); write it in single quotes, {_OBJECT}") from None
    if not isinstance(read, dict):
        raise ValueError(f"must be a JSON object, {_OBJECT} (got {value})")
    return read


def _read_list(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
    return value


def _read_names(value: Any) -> Any:
    if value == "":
        raise ValueError("is empty; write a name, or leave it out")
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
