"""The first part of `secateur plan`: ranks, bundles and memory of an engine as text. It uses no device."""

from __future__ import annotations

from cluster.convert import visible_gpus
from cluster.engine.rank_placement import rank_placements
from cluster.planner.memory import ModelShard
from cluster.serve.placement import Bundle, group_bundles
from workers.config import EngineConfig
from workers.models.draft_methods import method_of


def describe(name: str, config: EngineConfig, shards: list[ModelShard]) -> str:
    """Describe each rank's device, weights and KV, the Ray bundles, and the memory that KV pools may take."""
    from verifier.hidden_states import max_buffered_states

    kv_dtype = "" if config.kv_cache_dtype == "auto" else f" with a KV cache in {config.kv_cache_dtype}"
    lines = [
        f"{name}: device {config.device}, {config.dtype}{kv_dtype}, up to {config.max_model_len} tokens "
        f"and {config.max_num_seqs} requests at once",
        f"target   {config.model_path}",
        f"drafter  {_describe_draft(config, shards[-1].pass_depth)}",
        "",
        _row("rank", "role", "bundle", "device", "weights", "KV per token"),
    ]
    for placement in rank_placements(config):
        shard = shards[placement.rank >= config.tensor_parallel_size]
        device = (
            f"gpu {placement.bundle}" + (" (shared)" if placement.is_shared else "")
            if config.device == "cuda"
            else "cpu"
        )
        lines.append(
            _row(
                placement.rank,
                placement.role,
                placement.bundle,
                device,
                bytes_text(shard.weight_bytes),
                bytes_text(shard.token_bytes),
            )
        )
    bundles = group_bundles(config)
    per_request = config.pages_for(config.max_model_len)
    pages = config.num_pages or 1 + config.max_num_seqs * per_request
    kv_bytes = [pages * config.page_size * shard.token_bytes for shard in shards]
    lines += [
        "",
        f"bundles  {len(bundles)}, STRICT_PACK (all on one node): " + ", ".join(map(_bundle_text, bundles)),
        f"KV       pages of {config.page_size} tokens, {per_request} per longest request; "
        + ("at most " if config.num_pages is None else "")
        + f"{pages} pages take {bytes_text(kv_bytes[0])} per verifier rank"
        + (f" and {bytes_text(kv_bytes[1])} per drafter rank" if len(kv_bytes) > 1 else ""),
    ]
    roles = ("verifier", "drafter")[: len(shards)]
    more = [f"{bytes_text(s.workspace_bytes)} on each {role}" for s, role in zip(shards, roles, strict=True)]
    lines.append(f"more     graphs, activations and logits take up to {' and '.join(more)}")
    if seat := shards[0].seat_bytes:
        prefixes = f" and {count} cached prefixes" if (count := config.num_state_checkpoints) else ""
        lines.append(
            f"seats    recurrent states take {bytes_text(seat)} of a verifier rank for each running request, "
            f"{bytes_text(shards[0].states_bytes)} for max_num_seqs {config.max_num_seqs}{prefixes}, "
            "which is part of that"
        )
    if shards[0].state_bytes:
        waiting = max_buffered_states(config) * shards[0].state_bytes
        lines.append(f"states   of tokens that wait for the drafter take up to {bytes_text(waiting)} on verifier 0")
    if config.device == "cpu" and config.dtype == "float32":
        lines.append(
            "note     weights are counted in float32; matrices that were stored in 16 bits are kept in 16 bits, and a "
            "head that is tied to the embedding has memory of its own"
        )
    if any(shard.saved_bytes for shard in shards):
        lines.append("note     FP8 weights are counted in 8 bits, as GPUs from compute capability 8.9 on keep them")
    if config.device == "cuda" and shards[0].expert_items:
        lines.append(
            "note     a mixture of experts has CUDA graphs at most in bfloat16 on compute capability 9.x and 10.x; "
            "elsewhere each of its kernels is launched, so that small steps take longer than is predicted"
        )
    if config.device == "cuda" and not visible_gpus():
        lines.append(f"note     no GPU is visible here: whether a node has {len(bundles)} is not checked")
    return "\n".join(lines)


def _describe_draft(config: EngineConfig, pass_depth: int | None) -> str:
    draft = config.draft
    if draft is None:
        return "none: no speculation"
    tree = draft.tree
    depth = min(tree.max_depth, pass_depth or tree.max_depth)
    shape = f"{tree.kind} trees of up to {tree.num_speculative_tokens} nodes, depth {depth}"
    if not method_of(draft).is_model:
        lengths = f"{draft.prompt_lookup_min} to {draft.prompt_lookup_max} tokens"
        return f"n-gram lookup, matches of {lengths} ({draft.method}, {draft.placement}, {shape})"
    return f"{draft.model_path} ({draft.method}, {draft.placement}, {shape})"


def _row(*cells: object) -> str:
    widths = (5, 12, 7, 15, 10, 12)
    return "".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _bundle_text(bundle: Bundle) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items()) + "}"


def bytes_text(count: float) -> str:
    """Format a number of bytes with three digits, such as `1.23 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which three digits round up to 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
