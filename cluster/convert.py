"""Converts what users write to what the engine reads: EngineArgs -> EngineConfig.

It runs once, before any process starts, and does not initialise CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from cluster.copying import copied
from cluster.system.cores import num_cores
from cluster.system.gpus import gpu_names
from cluster.system.progress import Progress
from cluster.text.tokenizer import Tokenizer
from cluster.text.tokenizer_files import lacking_package
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError, MissingModelError, Problem
from secateur.install import install_command
from secateur.requests import DEFAULTED, ChatCompletionRequest
from secateur.schema import problems_of
from secateur.speculative import SpeculativeConfig
from workers.config import AcceptanceConfig, DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.models.config_json import read_json
from workers.models.draft_methods import METHODS, check_kinds, method_of, read_draft_spec, read_specs
from workers.models.gguf import convert_weights, describe, is_gguf
from workers.models.hub import fetch_weights as fetch_from_hub
from workers.models.hub import resolve_path
from workers.models.readers import read_spec
from workers.models.specs import DraftSpec, ModelSpec, Specs, TransformersSpec, check_parallel

_SOME_MESSAGES = [{"role": "user", "content": ""}]
_UNKNOWN_MODEL_LEN = 2048  # the placement does not depend on it


def visible_gpus() -> int:
    """Return the number of GPUs, or MIG slices, that this process may use."""
    return len(gpu_names())


def resolve_devices(args: EngineArgs, *, num_gpus: int | None) -> EngineArgs:
    """Return `args` with device and draft placement decided. Raises ConfigError if there are too few GPUs.

    `num_gpus`: the GPUs available to one engine. None = unknown, in a cluster: the arguments are not checked, and
    `auto` means CPU, because the builder has already resolved it.
    """
    if args.device == "auto":
        args = args.model_copy(update={"device": "cuda" if num_gpus else "cpu"})
    spec = args.speculative_config
    if args.device == "cpu":
        return args
    if spec is None:
        size = args.tensor_parallel_size
        if num_gpus is not None and num_gpus < size:
            raise _too_few(f"tensor_parallel_size={size} needs", size, num_gpus, "a smaller size" if num_gpus else "")
        return args
    placement = _placement(args.tensor_parallel_size, spec, num_gpus)
    return args.model_copy(update={"speculative_config": spec.model_copy(update={"draft_placement": placement})})


def placement_config(args: EngineArgs) -> EngineConfig:
    """Return the configuration that the placement needs, without reading a model file.

    args: as `resolve_devices` returns them.
    """
    assert args.device != "auto"
    if args.kernels == "triton" and args.device == "cpu":
        raise ConfigError(Problem("kernels", "triton needs device 'cuda'; on CPU write torch, or leave it out"))
    if args.threads is not None and args.device == "cuda":
        raise ConfigError(Problem("threads", "applies on CPU only; leave it out"))
    spec = args.speculative_config
    return copied(
        EngineConfig,
        args,
        model_path=args.model,
        max_model_len=args.max_model_len or _UNKNOWN_MODEL_LEN,
        dtype="float32",  # this and `threads` depend on the model
        threads=1,
        memory_utilization=args.gpu_memory_utilization,
        hang_timeout_s=args.hang_timeout,
        startup_timeout_s=args.startup_timeout,
        draft=_draft(spec, args.model) if spec else None,
    )


def engine_config(args: EngineArgs, *, num_gpus: int | None = None) -> EngineConfig:
    """Return the complete configuration, with model folders and the limits and end tokens read from them.

    Downloads the configuration and tokenizer of a Hugging Face id that is not in the local cache; `fetch_weights`
    downloads the weights. Raises ConfigError.
    """
    return read_engine(args, num_gpus=num_gpus)[0]


def read_engine(args: EngineArgs, *, num_gpus: int | None = None) -> tuple[EngineConfig, Specs]:
    """Return what `engine_config` does, and what was read of the models for it, so that it need not be read again."""
    args = resolve_devices(args, num_gpus=num_gpus)
    config = placement_config(args)
    path = model_folder(args.model, args.revision)
    draft = None if config.draft is None else _with_folder(config.draft, path)
    if draft is not None and args.online_learning == "on":
        draft = _learning(draft, Path(args.online_learning_path or "").expanduser().resolve())
    try:
        check_kinds(path, draft)  # first, because reading takes seconds of imports
        spec = read_spec(path)
        check_parallel(spec, config.tensor_parallel_size)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    config = replace(
        config,
        model_path=str(path),
        dtype=_dtype(args, config.device, spec),
        max_model_len=_max_model_len(args, spec),
        eos_token_ids=spec.eos_token_ids,
    )
    sampling_defaults(args, config.model_path)  # report an invalid generation_config.json before anything starts
    draft_spec = None if draft is None else _read_draft(draft, spec)
    if draft is not None and isinstance(draft_spec, ModelSpec) and draft_spec.vocab_size != spec.vocab_size:
        _check_vocabularies(args, config, draft.model_path, (spec.vocab_size, draft_spec.vocab_size))
    config, specs = replace(config, draft=draft, threads=_threads(args, config)), Specs(target=spec, draft=draft_spec)
    from cluster.door import check_tensors  # imports torch

    check_tensors(args, config, specs)
    if draft is not None and draft.learning_path:
        from drafter.learning.learner import why_not_learnable

        ranks, folder = draft.tensor_parallel_size, Path(draft.model_path)
        if why := why_not_learnable(draft_spec, folder, device=config.device, ranks=ranks):
            raise ConfigError(Problem("online_learning", why))
    _check_invariance(args, config, spec)
    return config, specs


def check_local_models(args: EngineArgs) -> None:
    """Refuse models in folders of this machine that are of the wrong kind. Takes no slow import. Raises ConfigError."""
    config = placement_config(resolve_devices(args, num_gpus=None))
    has_own = config.draft is not None and method_of(config.draft).weights == "own"
    names = [args.model, config.draft.model_path] if config.draft and has_own else [args.model]
    if all(Path(resolve_model(name)).expanduser().is_dir() for name in names):
        path = model_folder(args.model)
        if config.draft is None and "speculators_config" in read_json(path / "config.json"):
            return  # stands for its target and itself, see `cluster.pairs`
        try:
            check_kinds(path, config.draft and _with_folder(config.draft, path))
        except (ValueError, FileNotFoundError) as error:
            raise ConfigError(str(error)) from error


def load_tokenizer(args: EngineArgs, config: EngineConfig) -> Tokenizer:
    """Load the tokenizer of `args`, by default the model's. Raises ConfigError."""
    folder = Path(config.model_path) if args.tokenizer is None else model_folder(args.tokenizer, args.revision)
    if problem := lacking_package(folder):  # transformers would guess the file's format and warn
        raise ConfigError(Problem("tokenizer", problem))
    try:
        with _without_torch():
            return Tokenizer(str(folder))
    except Exception as error:  # transformers raises many kinds for files that it cannot read
        reason = f"none could be read from {folder} ({_first_line(error)})"
        message = f"{reason}; name a folder or a Hugging Face id that has one"
        raise ConfigError(Problem("tokenizer", message)) from error


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keep transformers from importing torch, unless that is done: a tokenizer needs none, and it takes seconds."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: None raises ModuleNotFoundError
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that models cannot run
    try:
        yield
    finally:
        del sys.modules["torch"]


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"


def with_tokenizer(args: EngineArgs, config: EngineConfig) -> tuple[EngineConfig, Tokenizer]:
    """Load the tokenizer and add its end-of-text token to the end tokens of the configuration. Raises ConfigError.

    As in vLLM: the tokenizer of a model fine-tuned for chats often has another end token than the model's files name.
    """
    tokenizer = load_tokenizer(args, config)
    config = replace(config, tokenizer_path=tokenizer.path)
    end = tokenizer.eos_token_id
    if end is None or end in config.eos_token_ids:
        return config, tokenizer
    return replace(config, eos_token_ids=(*config.eos_token_ids, end)), tokenizer


def sampling_defaults(args: EngineArgs, model_path: str) -> dict[str, Any]:
    """Return the model's sampling parameters for requests that leave them out. Raises ConfigError.

    `max_tokens` applies to chats alone; completions use OpenAI's default, as in vLLM.
    """
    if args.generation_config == "none":
        return {}
    path = Path(model_path) / "generation_config.json"
    written = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in read_json(path).items()}
    given = {name: written[name] for name in (*DEFAULTED, "max_tokens") if written.get(name) is not None}
    try:
        request = ChatCompletionRequest.model_validate({"messages": _SOME_MESSAGES, **given})
    except ValidationError as error:
        problems = "; ".join(map(str, problems_of(error, ChatCompletionRequest.model_fields)))
        problems = problems.replace("max_tokens", "max_new_tokens")
        message = f"{path}: {problems}; correct the file, or write none to do without it"
        raise ConfigError(Problem("generation_config", message)) from None
    return {name: getattr(request, name) for name in given}


def fetch_weights(args: EngineArgs, config: EngineConfig, progress: Progress | None = None) -> None:
    """Download the weights of Hugging Face ids that are not in the local cache, and convert those of GGUF files.

    Call it last, when all arguments are checked. config: what `engine_config` returned for `args`. progress: is told
    what takes long. Raises ConfigError if a model has no weights, or a pickle, whose header could not be read before,
    lacks a tensor.
    """
    progress = progress or Progress(is_shown=False)
    names = [(args.model, config.model_path)]
    if config.draft is not None and method_of(config.draft).weights == "own":
        assert args.speculative_config is not None and args.speculative_config.model is not None
        names.append((args.speculative_config.model, config.draft.model_path))
    fetched: list[str] = []
    for name, folder in names:
        source = Path(resolve_model(name)).expanduser()
        try:
            if is_gguf(source):
                with progress.during(f"converting the weights of {source.name}, unless that is done"):
                    convert_weights(source, Path(folder))
            elif source.is_dir():
                fetch_from_hub(str(source), Path(folder))  # checks that they are there
            else:
                with progress.during("fetching weights that are not here yet"):
                    fetched += fetch_from_hub(str(source), Path(folder))
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(str(error)) from error
    if any(name.endswith(".bin") for name in fetched):
        from cluster.door import check_tensors  # imports torch

        check_tensors(args, config, read_specs(config))


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model, given as a path, an id or an alias. Its weights may be missing.

    A GGUF file is converted to a folder in the user's cache (XDG Base Directory Specification). Raises ConfigError,
    MissingModelError if the model is not here.
    """
    path = Path(resolve_model(name)).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secateur"
    try:
        return describe(path, cache / "gguf") if is_gguf(path) else resolve_path(str(path), revision)
    except FileNotFoundError as error:
        raise MissingModelError(str(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except ModuleNotFoundError as error:
        told = f"{path}: reading it takes {error.name!r}; install it: {install_command('gguf')}"
        raise MissingModelError(told) from error


def _with_folder(draft: DraftConfig, target: Path) -> DraftConfig:
    """Return the drafter's configuration with its folder. Raises ConfigError. target: the target's folder."""
    match method_of(draft).weights:
        case "none":
            return draft
        case "target":
            return replace(draft, model_path=str(target))
        case "own":
            return replace(draft, model_path=str(model_folder(draft.model_path)))


def _learning(draft: DraftConfig, heads: Path) -> DraftConfig:
    """Return the configuration of a drafter that learns, with the newest head it has learnt."""
    from drafter.learning.learner import learnt_heads  # imports torch

    newest = learnt_heads(heads)[-1:] or [Path(draft.model_path)]
    return replace(draft, model_path=str(newest[0]), learning_path=str(heads))


def _read_draft(draft: DraftConfig, target: ModelSpec) -> DraftSpec | None:
    """Read the drafter's configuration. Raises ConfigError if the drafter does not fit the target."""
    if method_of(draft).weights == "target":
        _check_chain_of(draft.tree, target.num_mtp_layers)
    try:
        spec = read_draft_spec(draft, target)
        if spec is not None:
            check_parallel(spec, draft.tensor_parallel_size)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error).replace("tensor_parallel_size", "draft_tensor_parallel_size")) from error
    return spec


def _check_vocabularies(args: EngineArgs, config: EngineConfig, draft: str, sizes: tuple[int, int]) -> None:
    """Raise ConfigError unless the tokens of one tokenizer are the first ones of the other: the rest is padding."""
    differ = "the vocabularies of target and draft model have {} and {} rows".format(*sizes)
    instead = "use a draft model of the target's family"
    try:
        own = Tokenizer(draft).vocabulary
    except Exception as error:  # as in `load_tokenizer`
        raise ConfigError(f"{differ}, and {draft} has no tokenizer to compare; copy it there, or {instead}") from error
    others = load_tokenizer(args, config).vocabulary
    for id in sorted(own if len(own) < len(others) else others):
        if own.get(id) != others.get(id):
            raise ConfigError(f"{differ}, and token {id} is {others.get(id)!r} and {own.get(id)!r}; {instead}")


def _check_chain_of(tree: TreeConfig, num_layers: int) -> None:
    """Raise ConfigError if a chain longer than the prediction layers uses them unequally often, as vLLM does."""
    length = tree.num_speculative_tokens
    if tree.kind == "chain" and length > num_layers > 0 and length % num_layers:
        raise ConfigError(
            Problem(
                "speculative_config.num_speculative_tokens",
                f"{length} must be divisible by n_predict={num_layers}, the target's prediction layers",
            )
        )


def _placement(target: int, spec: SpeculativeConfig, num_gpus: int | None) -> Literal["dedicated", "colocated"]:
    """Return the drafter's placement: by default dedicated devices if there are enough. Raises ConfigError."""
    draft = spec.draft_tensor_parallel_size
    has_room = num_gpus is None or num_gpus >= target + draft
    placement = spec.draft_placement or ("dedicated" if has_room and METHODS[spec.method].is_model else "colocated")
    need = target + draft if placement == "dedicated" else target
    if num_gpus is not None and num_gpus < need:
        hint = "draft_placement='colocated', " if placement == "dedicated" and num_gpus >= target else ""
        sizes = f"tensor_parallel_size={target} and draft_tensor_parallel_size={draft} ({placement}) need"
        raise _too_few(sizes, need, num_gpus, f"{hint}smaller sizes")
    return placement


def _too_few(sizes: str, need: int, num_gpus: int, instead: str) -> ConfigError:
    """Return the error for too few GPUs. Without it Ray would wait for them forever."""
    remedies = " or ".join(filter(None, [instead, "device='cpu'"]))
    return ConfigError(f"{sizes} {need} GPU{'s' * (need > 1)}, {num_gpus} can be used; write {remedies}")


def _draft(spec: SpeculativeConfig, target: str) -> DraftConfig:
    method = METHODS[spec.method]
    return copied(
        DraftConfig,
        spec,
        "draft_",
        method=spec.method,
        model_path=target if method.weights == "target" else spec.model or "",
        prompt_lookup_min=spec.prompt_lookup_min or 0,
        prompt_lookup_max=spec.prompt_lookup_max or 0,
        placement=spec.draft_placement or ("dedicated" if method.is_model else "colocated"),
        tree=copied(
            TreeConfig,
            spec,
            "speculative_tree_",
            kind=spec.speculative_tree,
            num_speculative_tokens=spec.num_speculative_tokens,
            static_paths=spec.token_tree or (),
            prune=copied(PruneConfig, spec, "speculative_tree_prune_", auto=spec.speculative_tree_prune == "auto"),
        ),
        acceptance=copied(
            AcceptanceConfig,
            spec,
            "draft_",
            kind=spec.acceptance,
            rejection_method=spec.rejection_method,
            draft_probs=spec.enable_draft_probs,
            min_temperature=spec.draft_probs_min_temperature,
        ),
    )


def _dtype(args: EngineArgs, device: str, spec: ModelSpec) -> Literal["float32", "bfloat16", "float16"]:
    if args.dtype != "auto":
        return args.dtype
    if device == "cpu":
        return "float32"
    match spec.dtype:
        case "bfloat16" | "float16":
            return spec.dtype
        case "float32":  # or not said; 16 bits, as in vLLM
            return "bfloat16"
        case other:
            raise ConfigError(Problem("dtype", f"the checkpoint's {other} is not supported; write bfloat16"))


def _check_invariance(args: EngineArgs, config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError if results would depend on what is computed beside them although they must not."""
    if not args.batch_invariant:
        return
    is_own = not isinstance(spec, TransformersSpec) and not (spec.delta or spec.latent or spec.moe)
    wrong = (
        "needs Triton's kernels on device cuda; leave kernels out"
        if config.device == "cuda" and config.kernels == "torch"
        else "is for bfloat16; write dtype bfloat16, or leave it out: in float32 texts rarely part"
        if config.dtype != "bfloat16"
        else f"is not implemented for {spec.family}, only for dense models of our own decoder; leave it out"
        if not is_own
        else "is not implemented for sliding windows on device cuda; leave it out"
        if config.device == "cuda" and any(spec.windows)
        else None
    )  # fmt: skip
    if wrong:
        raise ConfigError(Problem("batch_invariant", wrong))
    if config.device == "cuda":
        return
    from workers.kernels.select import kernels_for  # imports torch

    try:
        kernels_for("cpu", batch_invariant=config.max_model_len)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _threads(args: EngineArgs, config: EngineConfig) -> int:
    """Return the threads of a verifier rank, see `EngineArgs.threads`. The drafter rests while the target computes."""
    if args.threads is None and config.device == "cpu" and config.dtype == "bfloat16":
        return max(1, num_cores() // config.tensor_parallel_size)
    return args.threads or 1


def _max_model_len(args: EngineArgs, spec: ModelSpec) -> int:
    limit = spec.max_scaled_positions
    length = args.max_model_len or spec.max_position_embeddings
    if length > limit:
        raise ConfigError(Problem("max_model_len", f"{length} is more than the model's {limit} positions; lower it"))
    if problems := args.page_problems(length):
        raise ConfigError(*problems)
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
