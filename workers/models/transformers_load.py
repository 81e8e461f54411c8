"""Loads a rank's share of a checkpoint into a transformers class: names, fused experts and the tensor-parallel plan.

A tensor-parallel plan maps name patterns to styles. For parameters, "colwise" keeps output rows and "rowwise" input
columns (only rank 0 adds its bias); "packed" does so in each half of a fused gate and up projection, for matrices and
stacked experts. "expert_pairs" splits the last dimension between pairs, which are a gate and an up column, and a
tensor "added_once" is that of rank 0. For modules, row-parallel layers and experts all-reduce their outputs;
"gather_output" and "split_input" enclose an operation on whole rows, such as a norm over all heads. Everything else is
replicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.models.checkpoint import Weights, split, text_name
from workers.models.decoder import has_own_head, is_legacy
from workers.models.layers import SINGLE, HeadSplit, RankWeights, TensorParallel, shard_vocab
from workers.models.specs import TransformersSpec
from workers.models.transformers_spec import build

_GATHERED = ("colwise_gather_output", "colwise_rep")
_REDUCED = ("rowwise", "rowwise_split_input", "rowwise_rep", "moe_tp_experts", "all_reduce")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
_EXPERT_UNIT = 8
"""torch's grouped matrix product needs rows of a multiple of 16 bytes."""


def skeleton(config: Any, attention: str, dtype: torch.dtype, max_model_len: int) -> Any:
    """Build a model with parameters on the meta device. Its buffers (such as rotary frequencies) are on the CPU."""
    with _parameters_on_meta():
        return build(config, attention, dtype, max_model_len)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Like torch.device("meta"), but for parameters only, because constructors compute buffers."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a shared parameter stays shared
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]  # restored below
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


class TensorShard(NamedTuple):
    """One rank's share of a tensor along a dimension; with `halves`, of each half (a fused gate and up projection)."""

    dim: int
    rank: int
    size: int
    halves: bool = False
    unit: int = 1  # shares are multiples of it, if the total is

    def bounds(self, total: int) -> tuple[int, int]:
        """Return (start, end) of this share of `total` items."""
        unit = 1 if total % self.unit else self.unit
        start, end = split(total // unit, self.rank, self.size)
        return start * unit, end * unit


class Shares:
    """A rank's share of every parameter of the base model."""

    def __init__(self, spec: TransformersSpec, base: nn.Module, tp: TensorParallel) -> None:
        self.tp = tp
        self._spec = spec
        self._plan = _without_needless_gathers(dict(spec.tp_plan))
        attention = base.get_submodule(spec.attention_name)
        styles = [self.style(f"{spec.attention_name}.{name}") for name, _ in attention.named_modules()]
        self.heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, tp if "colwise" in styles else SINGLE)
        """This rank's attention heads: all of them if the plan does not split attention."""

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the prediction layers that a drafter reads."""
        return self._spec.mtp_prefixes if self._spec.num_mtp_layers else ()

    def style(self, name: str) -> str | None:
        """Return the plan's style of a module or parameter of the base model."""
        return self._plan.get(_generic(name))

    def shard(self, name: str, shape: tuple[int, ...]) -> TensorShard | None:
        """Return this rank's share of a parameter, None = all. Raises ValueError if a dimension cannot be split."""
        if self.tp.size == 1:
            return None
        owner = name.rpartition(".")[0]
        style = self.style(name) or self.style(owner)
        rank, size = self.tp.rank, self.tp.size
        match style:
            case "colwise" | "colwise_gather_output" | "colwise_rep" | "packed_colwise":
                if owner.endswith(("k_proj", "v_proj")) and style == "colwise":
                    rank, size = self.heads.kv_rank, self.heads.kv_parts
                dim = max(0, len(shape) - 2)
            case "rowwise" | "rowwise_split_input" | "rowwise_rep" | "packed_rowwise":
                if len(shape) == 1:
                    return None
                dim = len(shape) - 1
            case "expert_pairs":
                return TensorShard(len(shape) - 1, rank, size, unit=2 * _EXPERT_UNIT)
            case None:
                return self._shard_of_heads(name, shape)
            case _:
                return None
        if style in _GATHERED and shape[dim] % size:
            raise ValueError(f"tensor_parallel_size {size} does not divide the {shape[dim]} rows of {name!r}")
        return TensorShard(dim, rank, size, style.startswith("packed_"), unit=_EXPERT_UNIT if len(shape) == 3 else 1)

    def _shard_of_heads(self, name: str, shape: tuple[int, ...]) -> TensorShard | None:
        """Return the share of weights [heads, d] that follow the heads without being in the plan (Cohere's norms)."""
        spec = self._spec
        is_split = self.heads.num_heads < spec.num_heads
        if not is_split or not _generic(name).startswith(f"{_generic(spec.attention_name)}."):
            return None
        if shape == (spec.num_heads, spec.head_dim):
            return TensorShard(0, self.tp.rank, self.tp.size)
        if shape == (spec.num_kv_heads, spec.head_dim):
            return TensorShard(0, self.heads.kv_rank, self.heads.kv_parts)
        return None

    def is_added_once(self, name: str) -> bool:
        """Return True for the bias of a row-parallel layer, which only rank 0 adds to the sum."""
        owner, _, leaf = name.rpartition(".")
        return (leaf == "bias" and self.style(owner) in _REDUCED) or self.style(name) == "added_once"

    def install_hooks(self, base: nn.Module) -> None:
        """Install the hooks that all-reduce, gather and split according to the plan."""
        if self.tp.size == 1:
            return
        for name, module in base.named_modules():
            style = self.style(name)
            if style in _GATHERED:
                module.register_forward_hook(lambda _, __, out: _gather(out, self.tp))
            if style in _SPLIT_INPUT:
                module.register_forward_pre_hook(lambda _, inputs: (_part(inputs[0], self.tp), *inputs[1:]))
            if style in _REDUCED:
                module.register_forward_hook(lambda _, __, out: self.tp.all_reduce_(out.contiguous()))


def _generic(name: str) -> str:
    """Return a name as in plans, with "*" for a layer's number (but not for the 1 of "fc1")."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _without_needless_gathers(plan: dict[str, str]) -> dict[str, str]:
    """Replace gathers that are not needed when a fused gate_up_proj is split in each half.

    Phi-3, GLM and GLM-4 gather it because their plans split across the halves.
    """
    for name, style in list(plan.items()):
        down = name.replace("gate_up_proj", "down_proj")
        if name.endswith(".gate_up_proj") and style in _GATHERED and plan.get(down) in _SPLIT_INPUT:
            plan |= {name: "packed_colwise", down: "rowwise"}
    return plan


def _gather(x: Tensor, tp: TensorParallel) -> Tensor:
    """Concatenate all ranks' columns, [..., T * W]."""
    parts = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(parts, x.contiguous(), group=tp.group)
    return torch.cat(parts, dim=-1)


def _part(x: Tensor, tp: TensorParallel) -> Tensor:
    start, end = split(x.shape[-1], tp.rank, tp.size)
    return x[..., start:end]


class StoredParts(NamedTuple):
    """The stored tensors of a parameter: one, or one per expert (and per part of a fused projection)."""

    parts: tuple[tuple[str, ...], ...]  # for gate_up_proj: the experts' gates, then their ups
    is_stacked: bool


def fill(model: Any, weights: RankWeights, shares: Shares, *, is_composite: bool) -> None:
    """Read every parameter and stored buffer of `model`, and move computed buffers to the weights' device.

    Args:
        model: a `skeleton`.
        is_composite: the checkpoint also contains vision or audio towers, which are not read.

    Raises:
        ValueError: a tensor is missing, unknown or has another shape.
    """
    sources, ignored = _sources(model, weights, shares.mtp_prefixes, is_composite=is_composite)
    reader = _Reader(model, weights, sources, weights.dtype)
    base_prefix = f"{model.base_model_prefix}."
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    is_tied = head.weight is embedding.weight and not _has_own_head(model, weights, sources, shares.tp)
    for module_name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{leaf}" if module_name else leaf
            if module is head:
                if is_tied and leaf == "weight":
                    continue
                start, end, _ = shard_vocab(parameter.shape[0], shares.tp)
                value = reader.read_range(name, start, end)
            else:
                inner = name.removeprefix(base_prefix)
                value = reader.read(name, tuple(parameter.shape), shares.shard(inner, tuple(parameter.shape)))
                if shares.tp.rank > 0 and shares.is_added_once(inner):
                    value.zero_()
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            name = f"{module_name}.{leaf}" if module_name else leaf
            is_stored = leaf not in module._non_persistent_buffers_set
            module._buffers[leaf] = (
                reader.read(name, tuple(buffer.shape), None) if is_stored else buffer.to(weights.device)
            )
    if is_tied:
        start, end, _ = shard_vocab(embedding.weight.shape[0], shares.tp)
        head.weight = nn.Parameter(embedding.weight[start:end], requires_grad=False)
    weights.finish(allowed=ignored)


def _sources(
    model: Any, weights: Weights, mtp_prefixes: tuple[str, ...], *, is_composite: bool
) -> tuple[dict[str, StoredParts], set[str]]:
    """Map parameter names to stored tensors by transformers' renaming rules; also return the ignored stored names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    targets = model.state_dict()
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    ignored: set[str] = set()
    found: dict[str, dict[str | None, list[str]]] = {}
    for stored in weights.names():
        name, pattern = rename_source_key(
            text_name(stored) if is_composite else stored, renamings, converters, model.base_model_prefix, targets
        )
        is_foreign = is_composite and name not in targets and "language_model" not in stored
        is_unread = name not in targets and any(re.search(rule, name) for rule in patterns)
        if is_legacy(stored) or is_foreign or is_unread or stored.startswith(mtp_prefixes):
            ignored.add(stored)
        else:
            found.setdefault(name, {}).setdefault(pattern, []).append(stored)
    return {name: _source(name, by_pattern, converters) for name, by_pattern in found.items()}, ignored


def _has_own_head(model: Any, weights: Weights, sources: dict[str, StoredParts], tp: TensorParallel) -> bool:
    """Apply `has_own_head` to a model with a tied head, by the stored names."""
    head, embedding = (
        sources.get(f"{_name_of(model, module)}.weight")
        for module in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    if head is None or embedding is None:
        return False
    num_rows = model.get_output_embeddings().weight.shape[0]
    return has_own_head(weights, head.parts[0][0], embedding.parts[0][0], num_rows, tp)


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, candidate in model.named_modules() if candidate is module)


def _source(name: str, by_pattern: dict[str | None, list[str]], converters: list[Any]) -> StoredParts:
    """Return one tensor, or experts to stack in order. Raises ValueError for any other conversion."""
    (pattern, stored), *more = by_pattern.items()
    if pattern is None and not more and len(stored) == 1:
        return StoredParts(((stored[0],),), is_stacked=False)
    rule = next((rule for rule in converters if pattern in rule.source_patterns), None)
    steps = [] if rule is None else [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
    if rule is None or steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        names = ", ".join(step for step, _ in steps) or f"{len(stored)} tensors of one name"
        raise ValueError(f"how {stored[0]!r} becomes {name!r} ({names}) is not implemented")
    parts = tuple(tuple(sorted(by_pattern.get(key, ()), key=_natural)) for key in rule.source_patterns)
    return StoredParts(parts, is_stacked=True)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts expert 10 after expert 9."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in name.split(".")]


class _Reader:
    """Reads parameters of `model` in their final dtype."""

    def __init__(self, model: Any, weights: Weights, sources: dict[str, StoredParts], dtype: torch.dtype) -> None:
        self._weights, self._sources = weights, sources
        kept = set(model._keep_in_fp32_modules_strict or ()) if dtype is not torch.float32 else set()
        if dtype is torch.float16:
            kept |= set(model._keep_in_fp32_modules or ())
        self._kept = kept

    def read(self, name: str, shape: tuple[int, ...], shard: TensorShard | None) -> Tensor:
        """Read a parameter or its shard. Raises ValueError if it is missing or has another shape."""
        source = self._source(name)
        if not source.is_stacked:
            ((stored,),) = source.parts
            self._check_shape(stored, shape)
            return self._slice(name, stored, shard)
        halves = shard is not None and shard.halves
        if shard is not None and (shard.dim == 0 or (halves and (shard.dim != 1 or len(source.parts) != 2))):
            raise ValueError(f"splitting the stacked {name!r} along dimension {shard.dim} is not implemented")
        # Experts are sharded one by one; a packed shard has the same share of gates and ups.
        inner = None if shard is None else shard._replace(dim=shard.dim - 1, halves=False)
        experts = {len(part) for part in source.parts}
        if experts != {shape[0]}:
            raise ValueError(f"{self._weights.path}: {name!r} needs {shape[0]} experts, found {sorted(experts)}")
        rows = shape[1] // len(source.parts)
        for part in source.parts:
            for stored in part:
                self._check_shape(stored, (rows, *shape[2:]))
        return self._stack(name, source.parts, inner)

    def _stack(self, name: str, parts: tuple[tuple[str, ...], ...], shard: TensorShard | None) -> Tensor:
        """Stack experts, [E, rows of all parts, ...], slice by slice, because two copies may not fit on a GPU."""
        first = self._slice(name, parts[0][0], shard)
        rows = first.shape[0]
        stacked = first.new_empty(len(parts[0]), rows * len(parts), *first.shape[1:])
        for at, part in enumerate(parts):
            for expert, stored in enumerate(part):
                stacked[expert, at * rows : (at + 1) * rows] = self._slice(name, stored, shard)
        return stacked

    def read_range(self, name: str, start: int, end: int) -> Tensor:
        """Read rows start:end of a parameter that is stored as one tensor."""
        ((stored,),) = self._source(name).parts
        return self._weights.get_range(stored, 0, start, end, self._dtype(name))

    def _slice(self, name: str, stored: str, shard: TensorShard | None) -> Tensor:
        dtype = self._dtype(name)
        if shard is None:
            return self._weights.get_range(stored, 0, 0, None, dtype)
        total = self._weights.shape(stored)[shard.dim] // (2 if shard.halves else 1)
        start, end = shard.bounds(total)
        if not shard.halves:
            return self._weights.get_range(stored, shard.dim, start, end, dtype)
        halves = [self._weights.get_range(stored, shard.dim, at + start, at + end, dtype) for at in (0, total)]
        return torch.cat(halves, dim=shard.dim)

    def _dtype(self, name: str) -> torch.dtype | None:
        return torch.float32 if any(re.search(kept, name) for kept in self._kept) else None

    def _source(self, name: str) -> StoredParts:
        if name not in self._sources:
            raise ValueError(f"{self._weights.path}: tensor {name!r} is missing")
        return self._sources[name]

    def _check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        if self._weights.shape(stored) != shape:
            raise ValueError(
                f"{self._weights.path}: tensor {stored!r} is {self._weights.shape(stored)}, the model expects {shape}"
            )
