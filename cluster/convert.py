"""From what users type to what the engine reads: EngineArgs -> EngineConfig, one HTTP request -> Submit.

The first half is done once, before any process starts, and never initialises CUDA. The second half knows the limits of
the running engine and answers what does not fit with a BadRequest that says the numbers.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from secateur.config import EngineArgs, Speculative, SpeculativeConfig, require_supported, resolve_model
from secateur.errors import ConfigError, Problem
from secateur.protocol import SamplingRequest
from workers.checkpoint import ModelSpec, check_heads, check_parallel, read_spec, resolve_path
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.ipc import Speculation, Submit
from workers.types import SamplingParams

_UNKNOWN_MODEL_LEN = 2048  # placing an engine does not depend on it
_GREEDY_BELOW = 1e-5  # as in vLLM: dividing logits by less overflows, and the result is the argmax anyway


def visible_gpus() -> int:
    """GPUs this process may use, found without touching them: a driver that initialises CUDA holds memory on all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    if visible is None:
        return installed
    return min(installed, len([name for name in visible.split(",") if name.strip()]))


def settle(args: EngineArgs, *, num_gpus: int | None) -> EngineArgs:
    """The arguments with device and draft placement decided. Raises ConfigError for what we lack or what cannot fit.

    `num_gpus`: the devices there are for one engine. None = not known (a cluster): what was asked is trusted, and
    `auto` means CPU.
    """
    require_supported(args)
    if args.device == "auto":
        args = args.model_copy(update={"device": "cuda" if num_gpus else "cpu"})
    spec = args.speculative_config
    if args.device == "cpu" or spec is None:
        return args
    placement = _placement(args.tensor_parallel_size, spec, num_gpus)
    return args.model_copy(update={"speculative_config": spec.model_copy(update={"draft_placement": placement})})


def layout_config(args: EngineArgs) -> EngineConfig:
    """All that placing the engine needs, without reading a model file. `args` are settled."""
    assert args.device != "auto"
    spec = args.speculative_config
    return EngineConfig(
        model_path=args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        device=args.device,
        max_model_len=args.max_model_len or _UNKNOWN_MODEL_LEN,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        page_size=args.page_size,
        num_pages=args.num_pages,
        memory_utilization=args.gpu_memory_utilization,
        draft=_draft(spec) if spec else None,
    )


def engine_config(args: EngineArgs, *, num_gpus: int | None = None) -> EngineConfig:
    """The complete configuration: models resolved to folders, limits and end tokens read from them. Raises ConfigError.

    A Hugging Face id is fetched here unless it is in the local cache.
    """
    args = settle(args, num_gpus=num_gpus)
    config = layout_config(args)
    path = model_folder(args.model, args.revision)
    spec = _read_spec(path, config.tensor_parallel_size, "tensor_parallel_size")
    config = replace(
        config,
        model_path=str(path),
        dtype=_dtype(args, config.device, spec),
        max_model_len=_max_model_len(args, spec),
        eos_token_ids=spec.eos_token_ids,
    )
    if config.draft is None:
        return config
    draft_path = model_folder(config.draft.model_path)
    if config.draft.method == "eagle3":
        _check_head(draft_path, spec, config.draft_ranks)
    else:
        draft = _read_spec(draft_path, config.draft_ranks, "draft_tensor_parallel_size")
        if draft.vocab_size != spec.vocab_size:
            raise ConfigError(
                "the target and the draft model should have the same vocabulary size "
                f"(got {spec.vocab_size} and {draft.vocab_size}); use a draft model of the target's family"
            )
    return replace(config, draft=replace(config.draft, model_path=str(draft_path)))


def model_folder(name: str, revision: str | None = None) -> Path:
    """The folder of a bundled alias, a path or a Hugging Face id. Raises ConfigError."""
    try:
        return resolve_path(resolve_model(name), revision)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def _read_spec(path: Path, size: int, parameter: str) -> ModelSpec:
    try:
        spec = read_spec(path)
        check_parallel(spec, size)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error).replace("tensor_parallel_size", parameter)) from error
    return spec


def _check_head(path: Path, target: ModelSpec, size: int) -> None:
    from workers.eagle3_format import read_eagle3_spec  # imports torch: seconds, and most errors come before it

    try:
        head = read_eagle3_spec(path, target)
        check_heads(head.num_heads, head.num_kv_heads, size)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error).replace("tensor_parallel_size", "draft_tensor_parallel_size")) from error


def _placement(target: int, spec: SpeculativeConfig, num_gpus: int | None) -> Literal["dedicated", "colocated"]:
    """Dedicated devices for the drafter when there are enough. Raises ConfigError if not even colocated fits."""
    draft = spec.draft_tensor_parallel_size
    chosen = spec.draft_placement or ("dedicated" if num_gpus is None or num_gpus >= target + draft else "colocated")
    need = target + draft if chosen == "dedicated" else target
    if num_gpus is not None and num_gpus < need:
        hint = "draft_placement='colocated', " if chosen == "dedicated" and num_gpus >= target else ""
        raise ConfigError(
            f"tensor_parallel_size={target} and draft_tensor_parallel_size={draft} ({chosen}) need {need} GPUs, "
            f"{num_gpus} can be used; write {hint}smaller sizes or device='cpu'"
        )
    return chosen


def _draft(spec: SpeculativeConfig) -> DraftConfig:
    assert spec.method in ("eagle3", "draft_model") and spec.model is not None  # require_supported, the schema's rules
    return DraftConfig(
        method=spec.method,
        model_path=spec.model,
        tensor_parallel_size=spec.draft_tensor_parallel_size,
        placement=spec.draft_placement or "dedicated",
        tree=TreeConfig(
            kind=spec.speculative_tree,
            num_nodes=spec.num_speculative_tokens,
            max_depth=spec.speculative_tree_max_depth,
            max_children=spec.speculative_tree_max_children,
            static_paths=spec.token_tree or (),
            prune=PruneConfig(
                min_prob=spec.speculative_tree_prune_min_prob, path_prob=spec.speculative_tree_prune_path_prob
            ),
        ),
    )


def _dtype(args: EngineArgs, device: str, spec: ModelSpec) -> Literal["float32", "bfloat16", "float16"]:
    if args.dtype != "auto":
        return args.dtype
    if device == "cpu":
        return "float32"
    match spec.dtype:
        case "float32" | "bfloat16" | "float16":
            return spec.dtype
        case other:
            raise ConfigError(Problem("dtype", f"the checkpoint's {other} is not supported; write bfloat16"))


def _max_model_len(args: EngineArgs, spec: ModelSpec) -> int:
    limit = spec.max_position_embeddings
    length = args.max_model_len or limit
    if length > limit:
        raise ConfigError(Problem("max_model_len", f"{length} is more than the model's {limit} positions; lower it"))
    draft_limit = args.speculative_config.max_model_len if args.speculative_config else None
    if draft_limit is not None and draft_limit < length:
        raise ConfigError(
            Problem(
                "speculative_config.max_model_len",
                f"a drafter that stops at {draft_limit} of max_model_len={length} tokens is not implemented in this "
                "version; leave it out, or lower max_model_len",
            )
        )
    return length


class BadRequest(ValueError):
    """A request this engine cannot take; `param` is the field at fault. Becomes a 400."""

    def __init__(self, message: str, *, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a request may ask of this engine."""

    max_model_len: int
    vocab_size: int
    num_draft_tokens: int
    """Nodes of the largest tree, without the root; 0 = the service has no drafter."""

    @classmethod
    def of(cls, config: EngineConfig, *, max_model_len: int, vocab_size: int) -> RequestLimits:
        nodes = config.draft.tree.num_nodes if config.draft else 0
        return cls(max_model_len=max_model_len, vocab_size=vocab_size, num_draft_tokens=nodes)


def submit_from(request: SamplingRequest, prompt: list[int], *, id: int, seed: int, limits: RequestLimits) -> Submit:
    """One prompt of a validated request as the engine takes it. Raises BadRequest.

    `seed` is used when the request brings none: see `SeedSource`.
    """
    return Submit(
        id=id,
        prompt=prompt,
        max_tokens=_max_tokens(request, prompt, limits),
        sampling=SamplingParams(
            temperature=request.temperature if request.temperature >= _GREEDY_BELOW else 0.0,
            top_k=max(request.top_k, 0),
            top_p=request.top_p,
            min_p=request.min_p,
            seed=seed if request.seed is None else request.seed,
        ),
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        speculation=_speculation(request.speculative, limits),
    )


def _max_tokens(request: SamplingRequest, prompt: list[int], limits: RequestLimits) -> int:
    if not prompt:
        raise BadRequest("the prompt has no tokens", param="prompt")
    if max(prompt) >= limits.vocab_size:
        raise BadRequest(f"token id {max(prompt)} is not in the vocabulary of {limits.vocab_size}", param="prompt")
    room, context = limits.max_model_len - len(prompt), limits.max_model_len
    if room < 1:
        raise BadRequest(
            f"this model's maximum context length is {context} tokens and the prompt has {len(prompt)}; shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    asked = request.max_completion_tokens or request.max_tokens
    if asked is None:  # a default is no promise: it ends where the context does
        return min(request.max_output_tokens or room, room)
    if asked > room:
        param = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        raise BadRequest(
            f"this model's maximum context length is {context} tokens, but {len(prompt)} prompt tokens and "
            f"{param}={asked} make {len(prompt) + asked}; ask for at most {room}",
            param=param,
            code="context_length_exceeded",
        )
    return asked


def _speculation(asked: Speculative | None, limits: RequestLimits) -> Speculation:
    if asked is None:
        return Speculation()
    if limits.num_draft_tokens == 0 and asked.enabled is not False and asked.model_fields_set:
        raise BadRequest("speculative: this service runs without a drafter; leave it out", param="speculative")
    nodes = asked.num_speculative_tokens
    if nodes is not None and nodes > limits.num_draft_tokens:
        raise BadRequest(
            f"speculative.num_speculative_tokens: {nodes} is more than this service's {limits.num_draft_tokens}",
            param="speculative",
        )
    off = asked.tree_prune == "off"
    return Speculation(
        enabled=asked.enabled is not False,
        num_tokens=nodes,
        min_prob=0.0 if off else asked.tree_prune_min_prob,
        path_prob=0.0 if off else asked.tree_prune_path_prob,
    )


class SeedSource:
    """Seeds for requests that bring none: H(server seed, arrival number), or drawn if the server has none either."""

    def __init__(self, server_seed: int | None, *, draw: Callable[[int], int] = secrets.randbits) -> None:
        self._server_seed = server_seed
        self._draw = draw
        self._arrivals = 0

    def next(self) -> int:
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        if self._server_seed is None:
            return self._draw(63)
        return derive_seed(self._server_seed, arrival)


def derive_seed(seed: int, number: int) -> int:
    """H(seed, number): 63 bits of BLAKE2b, the same on every machine and in every version."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
