"""The Ray bundles of one replica, and `secateur plan`: where everything would go and what it takes. Touches no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.convert import engine_config, visible_gpus
from cluster.seats import num_bundles, seats
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from workers.checkpoint import read_json, read_spec
from workers.config import EngineConfig

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
    target = read_spec(config.model_path)
    item = _ITEM_BYTES[config.dtype]
    sides = [_Side(config.model_path, target.num_kv_heads, config.tensor_parallel_size)]
    if config.draft is not None:
        sides.append(_Side(config.draft.model_path, _kv_heads(config.draft.model_path), config.draft_ranks))
    lines = [
        f"{args.model_id}: device {config.device}, {config.dtype}, up to {config.max_model_len} tokens "
        f"and {config.max_num_seqs} requests at once",
        f"target   {config.model_path}",
        f"drafter  {_describe_draft(config)}",
        "",
        _row("rank", "role", "bundle", "device", "weights", "KV per token"),
    ]
    for seat in seats(config):
        side = sides[0] if seat.rank < config.tensor_parallel_size else sides[-1]
        device = f"gpu {seat.bundle}" + (" (shared)" if seat.is_shared else "") if config.device == "cuda" else "cpu"
        weights = _bytes(side.weight_items() * item)
        lines.append(_row(seat.rank, seat.role, seat.bundle, device, weights, _bytes(side.kv_items() * item)))
    bundles = group_bundles(config)
    pages_per_request = -(-(config.max_model_len + config.tree_rows) // config.page_size)
    pages = config.num_pages or 1 + config.max_num_seqs * pages_per_request
    kv_bytes = [pages * config.page_size * side.kv_items() * item for side in sides]
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
_REPLICATED = ("embed_tokens.weight", "fc.weight")
"""Matrices every rank holds whole (see workers.model, workers.eagle3_format)."""


@dataclass(frozen=True)
class _Side:
    """One model and the ranks it is split over."""

    path: str
    num_kv_heads: int
    ranks: int

    def weight_items(self) -> int:
        """Numbers one rank holds. Matrices are split, vectors and the input embedding are not."""
        total = 0
        for name, shape in tensor_shapes(Path(self.path)).items():
            items = _product(shape)
            if len(shape) < 2 or name.endswith(_REPLICATED):
                total += items
            elif name.endswith(("k_proj.weight", "v_proj.weight")):
                total += items // min(self.ranks, self.num_kv_heads)
            else:
                total += items // self.ranks
        return total

    def kv_items(self) -> int:
        """Numbers one token takes in one rank's KV pool."""
        config = read_json(Path(self.path) / "config.json")
        if "draft_vocab_size" in config or "speculators_model_type" in config:
            layers, config = 1, config.get("transformer_layer_config", config)
        else:
            layers = config["num_hidden_layers"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return layers * 2 * -(-self.num_kv_heads // self.ranks) * head_dim


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a folder's safetensors files, from their headers."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as handle:
            shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    return shapes


def _kv_heads(path: str) -> int:
    config = read_json(Path(path) / "config.json")
    config = config.get("transformer_layer_config", config)
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _describe_draft(config: EngineConfig) -> str:
    draft = config.draft
    if draft is None:
        return "none: no speculation"
    tree = draft.tree
    shape = f"{tree.kind} trees of up to {tree.num_nodes} nodes, depth {tree.max_depth}"
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
