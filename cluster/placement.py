"""The Ray bundles of one replica, and `secateur plan`: where everything would go and what it takes. Touches no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.convert import engine_config, visible_gpus
from cluster.seats import num_bundles, seats
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from workers.checkpoint import MTP_PREFIXES, ModelSpec, read_spec
from workers.config import EngineConfig

if TYPE_CHECKING:
    from workers.eagle3_format import Eagle3Spec

REPLICA_CPUS = 0.1
CPU_WORKER_CPUS = 0.1
"""Logical CPUs a process asks Ray for by default. Small on purpose: Ray counts them, it does not enforce them, and a
laptop with two cores shall hold a replica, a proxy, two verifier ranks and a drafter."""

Bundle = dict[str, float]


def group_bundles(
    config: EngineConfig,
    *,
    per_worker: Mapping[str, float] | None = None,
    given: Sequence[Mapping[str, float]] | None = None,
    replica_cpus: float = REPLICA_CPUS,
    accelerator_type: str | None = None,
) -> list[Bundle]:
    """A bundle per device; the replica itself lives in bundle 0. Raises ConfigError for bundles that do not fit.

    `per_worker` replaces the shape of one bundle, to which the replica's CPUs are added; `given` is the whole list.
    """
    count = num_bundles(config)
    if given is not None:
        bundles = [dict(bundle) for bundle in given]
        if len(bundles) != count:
            raise _wrong("bundles", f"has {len(bundles)} bundles, the engine needs {count}: one per device")
        if bundles[0].get("CPU", 0) < replica_cpus:
            raise _wrong("bundles", f"the first one also holds the replica and needs at least CPU: {replica_cpus}")
    else:
        bundles = [dict(per_worker or _default_bundle(config)) for _ in range(count)]
        bundles[0]["CPU"] = round(bundles[0].get("CPU", 0.0) + replica_cpus, 4)
    if config.device == "cuda" and any(bundle.get("GPU", 0) < 1 for bundle in bundles):
        field = "bundle_per_worker" if given is None else "bundles"
        raise _wrong(field, "every bundle needs GPU: 1 with device 'cuda'")
    if accelerator_type is not None and config.device == "cuda":
        for bundle in bundles:
            bundle.setdefault(f"accelerator_type:{accelerator_type}", 0.001)
    return bundles


def _default_bundle(config: EngineConfig) -> Bundle:
    return {"GPU": 1.0, "CPU": 1.0} if config.device == "cuda" else {"CPU": CPU_WORKER_CPUS}


def _wrong(field: str, message: str) -> ConfigError:
    return ConfigError(Problem(f"placement_group_config.{field}", message))


def plan(args: EngineArgs) -> str:
    """Topology, bundles and memory of the engine `args` describe, as text for people. Raises ConfigError.

    Weights are counted from the files' headers; nothing is loaded and no device is touched.
    """
    config = engine_config(args, num_gpus=visible_gpus() or None)
    sides = _sides(config)
    lines = [
        f"{args.model_id}: device {config.device}, {config.dtype}, up to {config.max_model_len} tokens "
        f"and {config.max_num_seqs} requests at once",
        f"target   {config.model_path}",
        f"drafter  {_describe_draft(config)}",
        "",
        _row("rank", "role", "bundle", "device", "weights", "KV per token"),
    ]
    for seat in seats(config):
        side = sides[seat.rank >= config.tensor_parallel_size]
        device = f"gpu {seat.bundle}" + (" (shared)" if seat.is_shared else "") if config.device == "cuda" else "cpu"
        lines.append(
            _row(seat.rank, seat.role, seat.bundle, device, _bytes(side.weight_bytes), _bytes(side.token_bytes))
        )
    bundles = group_bundles(config)
    pages_per_request = -(-(config.max_model_len + config.tree_rows) // config.page_size)
    pages = config.num_pages or 1 + config.max_num_seqs * pages_per_request
    kv_bytes = [pages * config.page_size * side.token_bytes for side in sides]
    lines += [
        "",
        f"bundles  {len(bundles)}, STRICT_PACK (all on one node): " + ", ".join(map(_bundle_text, bundles)),
        f"KV       pages of {config.page_size} tokens, {pages_per_request} per longest request; "
        f"{'at most ' if config.num_pages is None else ''}{pages} pages take {_bytes(kv_bytes[0])} per verifier rank"
        + (f" and {_bytes(kv_bytes[1])} per drafter rank" if len(kv_bytes) > 1 else ""),
    ]
    if config.device == "cuda" and not visible_gpus():
        lines.append(f"note     no GPU is visible here: whether a node has {len(bundles)} is not checked")
    return "\n".join(lines)


_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOKEN_ID_BYTES = 4
_REPLICATED = ("embed_tokens.weight", "fc.weight", "input_proj.weight")
"""Matrices every rank holds whole (see workers.model, workers.eagle3_format, drafter.fc_head)."""


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Side:
    """What one rank of the target, or of the drafter, holds."""

    weight_bytes: int
    token_bytes: int  # in its KV pool


def _sides(config: EngineConfig) -> list[_Side]:
    """The target's side and, if there is one, the drafter's."""
    from workers.eagle3_format import read_eagle3_spec
    from workers.fc_head_format import read_eagle_spec, read_mtp_spec

    target, stored = read_spec(config.model_path), tensor_shapes(Path(config.model_path))
    item, draft = _ITEM_BYTES[config.dtype], config.draft
    own = {name: shape for name, shape in stored.items() if not name.startswith(MTP_PREFIXES)}
    sides = [_side(own, target, config.tensor_parallel_size, item)]
    if draft is None:
        return sides
    shapes = tensor_shapes(Path(draft.model_path)) if draft.model_path else {}
    match draft.method:
        case "ngram":
            return [*sides, _Side(weight_bytes=0, token_bytes=_TOKEN_ID_BYTES)]
        case "draft_model":
            return [*sides, _side(shapes, read_spec(draft.model_path), config.draft_ranks, item)]
        case "eagle3":
            head: ModelSpec | Eagle3Spec = read_eagle3_spec(draft.model_path, target)
        case "eagle":
            head = read_eagle_spec(draft.model_path, target).layers
        case "mtp":
            head = read_mtp_spec(draft.model_path, target).layers
            shapes = {name: shape for name, shape in stored.items() if name.startswith(MTP_PREFIXES)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in stored and name.removeprefix("model.") not in shapes:
            shapes[name] = stored[name]
    return [*sides, _side(shapes, head, config.draft_ranks, item)]


def _side(shapes: Shapes, spec: ModelSpec | Eagle3Spec, ranks: int, item: int) -> _Side:
    """Matrices are split, vectors and the input embedding are not."""
    weights = 0
    for name, shape in shapes.items():
        items = _product(shape)
        if len(shape) < 2 or name.endswith(_REPLICATED):
            weights += items
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            weights += items // min(ranks, spec.num_kv_heads)
        else:
            weights += items // ranks
    token = spec.num_layers * 2 * -(-spec.num_kv_heads // ranks) * spec.head_dim
    return _Side(weight_bytes=weights * item, token_bytes=token * item)


def tensor_shapes(folder: Path) -> Shapes:
    """Name -> shape of every tensor in a folder's safetensors files, from their headers."""
    from safetensors import safe_open

    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as handle:
            shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    return shapes


def _describe_draft(config: EngineConfig) -> str:
    draft = config.draft
    if draft is None:
        return "none: no speculation"
    tree = draft.tree
    shape = f"{tree.kind} trees of up to {tree.num_nodes} nodes, depth {tree.max_depth}"
    if draft.method == "ngram":
        lengths = f"{draft.prompt_lookup_min} to {draft.prompt_lookup_max} tokens"
        return f"n-gram lookup, matches of {lengths} (ngram, {draft.placement}, {shape})"
    return f"{draft.model_path} ({draft.method}, {draft.placement}, {shape})"


def _row(*cells: object) -> str:
    widths = (5, 12, 7, 15, 10, 12)
    return "".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _bundle_text(bundle: Bundle) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items()) + "}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
