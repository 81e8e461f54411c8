"""Memory and arithmetic of one rank, counted from the headers of the weight files; nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from workers.config import EngineConfig
from workers.kernels.block_scaled import KEPT_TYPES, tile_columns
from workers.models.checkpoint import Weights, text_name
from workers.models.config_json import read_json
from workers.models.draft_methods import METHODS, method_of, read_specs
from workers.models.specs import MTP_PREFIXES, DraftSpec, ModelSpec, Shapes, TransformersSpec
from workers.workspace import kept_quantization, seat_bytes, states_bytes

_TOKEN_ID_BYTES = 4
_CONTEXT_BYTES = 512 << 20
"""CUDA takes this much for each process on a device (assumed, not measured)."""
_REPLICATED = (
    "embed_tokens.weight",
    "fc.weight",
    "input_proj.weight",
    "eh_proj.weight",
    "markov_w1.weight",
    "markov_head.gate_proj.weight",
)
"""Matrices that every rank holds whole, see `workers.models.decoder`, `eagle3_format`, `drafter.proposers.eagle` and
`block`."""
_LATENTS = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Those of latent attention, which alone of them may stay in 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """One rank's share of a model. For n-gram lookup it is only the KV pool, which holds token ids."""

    weight_bytes: int = 0
    """Each weight once; `topology.describe` names the additional copies on CPU."""
    token_bytes: int = 0
    """Bytes of one token in the KV pool."""
    state_bytes: int = 0
    """Bytes of one hidden state that verifier 0 buffers for the drafter: the last of every page, and pending ones."""
    workspace_bytes: int = 0
    """Bytes for CUDA graphs, activations and logits, see `workers.workspace`."""
    matmul_items: int = 0
    """Weights that take part in matrix products: all matrices but the input embedding."""
    expert_items: int = 0
    """The part of `matmul_items` that belongs to experts; each row uses `expert_share` of them."""
    expert_share: float = 1.0
    num_layers: int = 0
    hidden_size: int = 0
    attention_width: int = 0
    """Query heads x head size, of all layers with attention."""
    seat_bytes: int = 0
    """Recurrent states of one running request, and the rows of its tree that wait for a verdict."""
    states_bytes: int = 0
    """All of these, and the recurrent states behind cached prefixes."""
    item_bytes: int = 4
    saved_bytes: int = 0
    """The bytes that matrices in 8 bits save, in memory and each time they are read, over `item_bytes` a weight."""
    pass_depth: int | None = None
    """Tokens that one pass of a block head drafts. None for other drafters, which run a pass for each level."""


def model_shards(config: EngineConfig) -> list[ModelShard]:
    """Return the target's shard and, if there is a drafter, the drafter's."""
    from drafter.workspace import draft_workspace
    from verifier.workspace import target_workspace

    specs = read_specs(config)
    target, spec = specs.target, specs.draft
    stored = _of_text_model(tensor_shapes(Path(config.model_path))) or expected_shapes(target, config.model_path)
    item, kv_item, draft = config.item_bytes, config.kv_item_bytes, config.draft
    own = {name: shape for name, shape in stored.items() if not name.startswith(target.mtp_prefixes)}
    sizes = sizes_in_bits(config, config.model_path, target, config.tensor_parallel_size)
    method = METHODS["ngram"] if draft is None else method_of(draft)
    num_taps = 0 if spec is None else len(spec.tap_layers)
    width = max(num_taps, 1) * target.hidden_size * method.reads_features
    workspace = target_workspace(config, target, num_taps=num_taps, state_width=width)
    shard = model_shard(own, target, config.tensor_parallel_size, item, kv_item, sizes)
    found = [
        replace(
            shard,
            state_bytes=width * item,
            workspace_bytes=workspace.total,
            seat_bytes=seat_bytes(config, target),
            states_bytes=states_bytes(config, target),
        )
    ]
    if draft is None:
        return found
    beside = draft_workspace(config, spec).total
    shapes = _of_text_model(tensor_shapes(Path(draft.model_path))) if draft.model_path else {}
    if spec is None:
        return [*found, ModelShard(token_bytes=_TOKEN_ID_BYTES)]
    sizes = sizes_in_bits(config, draft.model_path or config.model_path, spec, config.draft_ranks)
    if method.weights == "target":
        shapes = {name: shape for name, shape in stored.items() if name.startswith(target.mtp_prefixes)}
    shapes = shapes or expected_shapes(spec, draft.model_path)
    if spec.draft_vocab_size < spec.layers.vocab_size:  # some rows of the target's, if it is not the head's own
        shapes.setdefault("lm_head.weight", (spec.draft_vocab_size, spec.layers.hidden_size))
    if method.reads_features:  # a head without an embedding or a vocabulary head uses the target's
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in stored and name.removeprefix("model.") not in shapes:
                shapes[name] = stored[name]
    own_shard = model_shard(shapes, spec.layers, config.draft_ranks, item, kv_item, sizes)
    return [*found, replace(own_shard, workspace_bytes=beside, pass_depth=spec.max_depth)]


def model_shard(
    shapes: Shapes,
    spec: ModelSpec,
    ranks: int,
    item: int,
    kv_item: int,
    sizes: Mapping[str, float] | None = None,
) -> ModelShard:
    """Count one rank's weights: matrices are split, vectors and the input embedding are not.

    A tied head multiplies with the embedding. item, kv_item: bytes of a weight, and of a key's or value's element.
    sizes: bytes per weight of matrices whose weights do not take `item`.
    """
    held = multiplied = experts = 0
    saved = 0.0
    for name, shape in shapes.items():
        items = share = math.prod(shape)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            share = items // min(ranks, spec.num_kv_heads)
        elif len(shape) > 1 and not name.endswith((*_REPLICATED, *_LATENTS)):
            share = items // ranks
        held += share
        saved += share * (item - (sizes or {}).get(name, item))
        if name.endswith("embed_tokens.weight"):
            is_head = not any(other.endswith("lm_head.weight") for other in shapes)
            multiplied += is_head * items // ranks
        elif len(shape) > 1:
            multiplied += share
            is_stack = len(shape) == 3 and not name.endswith("conv1d.weight")
            experts += share if ".experts." in name or is_stack else 0
    token = spec.num_kv_layers * spec.num_parts * -(-spec.num_kv_heads // ranks) * spec.head_dim
    return ModelShard(
        weight_bytes=held * item - int(saved),
        saved_bytes=int(saved),
        token_bytes=token * kv_item,
        matmul_items=multiplied,
        expert_items=experts,
        expert_share=spec.expert_share,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        attention_width=spec.num_heads * spec.head_dim * spec.num_kv_layers // ranks,
        item_bytes=item,
    )


def sizes_in_bits(config: EngineConfig, folder: str, spec: DraftSpec, ranks: int) -> dict[str, float]:
    """Return the bytes per weight of the matrices of a folder that a GPU keeps in their bits, their scales included.

    {} where none are kept so. Columns that are cut inside a block are not, which some ranks then dequantize. The GPU is
    taken to convert float8, see `workers.kernels.triton_linear.kept_types`.
    """
    how = kept_quantization(config, folder, spec)
    if how is None:
        return {}
    try:
        weights = Weights(folder, torch.bfloat16, kept=KEPT_TYPES)
    except FileNotFoundError:  # all that config.json does not exclude
        quantization = read_json(Path(folder) / "config.json").get("quantization_config") or {}
        kept_whole = tuple(f"{name}.weight" for name in quantization.get("modules_to_not_convert") or ())
        shapes = {name: shape for name, shape in expected_shapes(spec, folder).items() if name not in kept_whole}
        columns = {name: (shape[1], *how.columns_of(shape[1])) for name, shape in shapes.items()}
    else:
        found = {name: stored for name in weights.names() if (stored := weights.kept(name)) is not None}
        columns = {
            name: (*stored.columns, stored.bytes_in_bits)
            for name, stored in found.items()
            if stored.block_of(slice(0, stored.columns[0])) is not None
        }

    def is_cut(name: str) -> bool:
        num_inputs, block, _ = columns[name]
        is_split_by_columns = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
        return (
            block != num_inputs
            and is_split_by_columns
            and any(num_inputs * rank // ranks % block for rank in range(ranks))
        )

    kinds = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", *_LATENTS)
    others = (*_REPLICATED, "kv_b_proj.weight")
    names = [name for name in columns if name.endswith(kinds) and not name.endswith(others)]
    return {name: columns[name][2] for name in names if tile_columns(columns[name][1]) is not None and not is_cut(name)}


def tensor_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor an engine reads from a folder, by name; {} without weights.

    The scales of quantized weights are left out; `sizes_in_bits` counts those that are kept.
    """
    try:
        weights = Weights(folder)
    except FileNotFoundError:
        return {}
    return {name: weights.shape(name) for name in weights.names()}


def _of_text_model(shapes: Shapes) -> Shapes:
    """Drop vision and audio towers, which no engine reads, and rename tensors as in a text-only checkpoint."""
    if not any("language_model" in name for name in shapes):
        return shapes
    return {
        text_name(name): shape
        for name, shape in shapes.items()
        if "language_model" in name or name.startswith(("lm_head", *MTP_PREFIXES))
    }


def expected_shapes(spec: DraftSpec, folder: Path | str) -> Shapes:
    """Return the matrix shapes of a checkpoint when only its config.json is in `folder`."""
    if isinstance(spec, TransformersSpec):
        from workers.models.transformers_spec import parameter_shapes

        return parameter_shapes(folder)
    return spec.matrix_shapes()


class DeviceLoad(NamedTuple):
    """The bytes that a device's ranks hold together, without KV pages, and those of one page in all their pools."""

    role: str
    held: int
    page: int


def device_loads(config: EngineConfig, found: list[ModelShard]) -> list[DeviceLoad]:
    """Return the load of each kind of device.

    Of the verifier's devices, the one of rank 0 counts: it buffers hidden states for the drafter, and so has the least
    room. A colocated drafter is on it.
    """
    from verifier.hidden_states import max_buffered_states

    def held(part: ModelShard) -> int:
        context = _CONTEXT_BYTES if part.weight_bytes else 0
        return context + part.weight_bytes + part.workspace_bytes + max_buffered_states(config) * part.state_bytes

    def page(part: ModelShard) -> int:
        return part.token_bytes * config.page_size + part.state_bytes

    roles = dict(zip(("verifier", "drafter"), found, strict=False))
    if config.draft is not None and config.draft.placement == "colocated":
        return [DeviceLoad(" and ".join(roles), sum(map(held, found)), sum(map(page, found)))]
    return [DeviceLoad(role, held(part), page(part)) for role, part in roles.items()]


def pages_on_device(config: EngineConfig, found: list[ModelShard], memory_bytes: float) -> int:
    """Return how many KV pages fit with the weights on a device of this size; the smaller of the two ranks' counts.

    This follows `workers.kv_sizing`: target and drafter have as many pages each.
    """
    usable = memory_bytes * config.memory_utilization
    return max(0, int(min((usable - load.held) // load.page for load in device_loads(config, found))))
