"""Checks whether the transformers backend supports a checkpoint of any other architecture.

The model class is probed: built on the meta device (no memory, well under a second for most), it runs two tokens with
an attention function and a mask function that only record their arguments: heads, widths, visible keys and options. So
a window, chunked mask, softcap or attention sink is detected as the class uses it, independent of its configuration,
and unsupported features are rejected before any process starts.
This module only uses parts of transformers that are the same in 5.17 and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workers.models.config_json import SUPPORTED_ARCHITECTURES, eos_ids, read_json
from workers.models.head_layers import num_mtp_layers
from workers.models.rope import reach
from workers.models.specs import TransformersSpec

PARAMETER_STYLES = {
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
    "packed_colwise", "packed_rowwise", "expert_pairs",
}  # fmt: skip
"""Styles of a tensor-parallel plan that split parameters."""

WHOLE_STYLES = {
    "added_once", "all_reduce", "embedding_colwise", "embedding_rowwise", "local_params", "moe_tp_experts", "replicate",
    "replicated_with_grad_allreduce",
}  # fmt: skip
"""Styles that replicate parameters on every rank (here also embeddings)."""

_OWN_PLANS = {
    "gpt_oss": {
        **dict.fromkeys((f"layers.*.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "sinks")), "colwise"),
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "expert_pairs",
        "layers.*.mlp.experts.gate_up_proj_bias": "expert_pairs",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "added_once",
    }
}
"""Tensor-parallel plans of classes that have none in transformers, by model type; styles: `transformers_load`."""

TESTED = frozenset(
    """
    afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe cwm dots1 ernie4_5 ernie4_5_moe
    exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe gpt2 gpt_bigcode
    gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna mellum minimax_m2
    ministral ministral3 mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2_moe qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
    """.split()
)
"""Model types whose logits tests/workers/models/test_architectures.py compares with transformers."""

_WITH_MTP = {"glm4_moe"}
"""Model types whose prediction layers drafters run (`workers.models.fc_head_format`). Their classes skip them."""
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_HANDLED = {"sliding_window", "softcap", "s_aux", "position_ids", "cache_position"}
_PROBE = "secateur_probe"
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_ROW = ("num_experts_per_tok", "moe_topk", "moe_k")


def read_transformers_spec(path: Path, raw: dict[str, Any]) -> TransformersSpec:
    """Read the model that a folder's config.json (`raw`) describes.

    Raises:
        ValueError: the class needs a feature that our attention does not support, or its tensor-parallel plan one that
            we do not; the message names it.

    Returns:
        TransformersSpec: for one rank only if the class has no tensor-parallel plan.
    """
    found = (raw.get("architectures") or [raw.get("model_type")])[0]
    config = model_config(path, found)
    plan = dict(getattr(config, "base_model_tp_plan", None) or _OWN_PLANS.get(config.model_type, {}))
    for pattern, style in plan.items():
        if style == "mla_kv_a_proj":
            raise _refusal(found, f"multi-head latent attention ({pattern}) is not implemented", path)
        if style not in PARAMETER_STYLES | WHOLE_STYLES:
            raise _refusal(found, f"style {style!r} of its tensor-parallel plan ({pattern}) is not implemented", path)
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise _refusal(found, f"layers of type {', '.join(sorted(others))} are not implemented", path)
    if not str(found).endswith(_GENERATING):
        raise _refusal(found, f"it does not generate text, as {' and '.join(_GENERATING)} do", path)
    try:
        observed = _observe(config)
    except _Unsupported as error:
        raise _refusal(found, str(error), path) from error
    return _spec(config, plan, observed, raw, path)


def model_config(path: Path | str, found: object) -> Any:
    """Return a folder's text configuration; for a model with vision or audio towers, its text part.

    Raises:
        ValueError: transformers does not know the model or rejects its config.json. Python code from the folder
            (`auto_map`) is never run; by default, transformers would ask at the terminal.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = read_json(Path(path) / "config.json")
    if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
        unknown = f"transformers does not know model type {raw.get('model_type')!r}"
        raise _refusal(found, f"{unknown}, and Python code from a checkpoint is not run", Path(path))
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True)
    except Exception as error:  # transformers' validation raises various types, even KeyError
        raise _refusal(found, f"transformers cannot read its config.json: {_short(error)}", Path(path)) from error


def build(config: Any, attention: str, dtype: torch.dtype, max_model_len: int | None = None) -> Any:
    """Build the causal language model of a configuration (which is modified), in eval mode, with our attention.

    max_model_len: for `freeze_rope`; None on the meta device, which has no frequencies. The caller determines the
    device of parameters and buffers.
    """
    config._attn_implementation = attention
    config.use_cache = False
    config.quantization_config = None  # `Weights` dequantizes
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            setattr(config, name, False)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    freeze_rope(model, max_model_len)
    return model


def parameter_shapes(path: Path | str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a folder's text model, by name, without reading its weights.

    Raises ValueError if transformers does not know the model.
    """
    with torch.device("meta"):
        model = build(model_config(path, "the model"), "eager", torch.float32)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def freeze_rope(model: Any, max_model_len: int | None) -> None:
    """Make every rotary embedding's frequencies independent of the positions.

    "dynamic" and "longrope" change the frequencies of the whole batch once a position exceeds a limit, which would
    invalidate cached keys. For "dynamic" the initial frequencies stay, and `workers.models.rope.reach` keeps requests
    below the limit. For "longrope" max_model_len decides: the short frequencies up to the original length, the long
    ones above, for sequences of any length, as in vLLM.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                _see_last_position(module, kind, max_model_len, layer_type=layer_type)
            module.rope_type = dict.fromkeys(kinds, "default")
        elif kinds is not None:
            _see_last_position(module, kinds, max_model_len)
            module.rope_type = "default"


def _see_last_position(module: Any, kind: str, max_model_len: int | None, **layer_type: str) -> None:
    """Make a "longrope" embedding select the frequencies for max_model_len."""
    if kind == "longrope" and max_model_len is not None:
        module(torch.zeros(1), torch.tensor([[max_model_len - 1]]), **layer_type)


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer's call of the attention function."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    module: nn.Module


@dataclass(frozen=True, slots=True)
class _Observed:
    """The result of probing a model class."""

    calls: tuple[_Call, ...]  # by layer
    layers_name: str
    attention_name: str
    class_name: str
    tie_embeddings: bool
    has_experts: bool
    copies_from_host: bool
    hidden_dims: int  # dimensions of the layers' input


_calls: ContextVar[list[_Call]] = ContextVar("_calls")


class _Unsupported(ValueError):
    """The class needs a feature that is not implemented."""


def _observe(config: Any) -> _Observed:
    """Probe a class with two tokens on the meta device."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_PROBE, _record)
    AttentionMaskInterface.register(_PROBE, _window_of)
    # Other implementations of experts read values, which meta tensors do not have.
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        try:
            model = build(config, _PROBE, torch.float32)
        except KeyError as error:
            what = "its attention is not one that can be replaced" if _PROBE in str(error) else f"it lacks {error}"
            raise _Unsupported(what) from error
        except Exception as error:
            raise _Unsupported(f"transformers cannot build it: {_short(error)}") from error
    base = model.base_model
    calls: list[_Call] = []
    dims: list[int] = []
    layers_name = _layers_name(base, config.num_hidden_layers)
    base.get_submodule(f"{layers_name}.0").register_forward_pre_hook(
        lambda _, inputs, named: dims.append((inputs[0] if inputs else named["hidden_states"]).dim()), with_kwargs=True
    )
    two = torch.zeros(1, 2, dtype=torch.long, device="meta")
    inputs = {"input_ids": two, "position_ids": two, "attention_mask": torch.ones_like(two), "use_cache": False}
    copies = _HostCopies()
    try:
        with torch.no_grad(), copies, _probing(calls):
            base(**inputs)
    except _Unsupported:
        raise
    except Exception as error:
        raise _Unsupported(
            "its forward pass needs more than attention over cached keys and values "
            f"({type(error).__name__}: {_short(error)})"
        ) from error
    calls.sort(key=lambda call: call.layer)
    _check(config, base, calls)
    names = {module: name for name, module in base.named_modules()}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    given = GivenHidden.put_into(model)
    given.value = torch.empty(1, 2, config.hidden_size, device="meta")
    try:
        model(**GivenHidden.INPUTS)
    except Exception as error:
        raise _Unsupported(f"its head needs more than hidden states ({_short(error)})") from error
    return _Observed(
        calls=tuple(calls),
        layers_name=layers_name,
        attention_name=names[calls[0].module],
        class_name=type(model).__name__,
        tie_embeddings=tied,
        has_experts=any(parameter.dim() == 3 for parameter in base.parameters()),
        copies_from_host=copies.is_any,
        hidden_dims=dims[0],
    )


class GivenHidden(nn.Module):
    """Replaces the base model in ForCausalLM.forward, to compute only logits."""

    INPUTS: ClassVar[dict[str, Any]] = {"input_ids": None, "use_cache": False}
    """The inputs of the class' forward pass, which hands them to the base model."""
    value: Tensor

    @staticmethod
    def put_into(model: Any) -> GivenHidden:
        """Replace the base model of a class."""
        given = GivenHidden()
        setattr(model, model.base_model_prefix, given)
        return given

    @property
    def decoder(self) -> GivenHidden:
        """Return itself: OPT's head calls this part of its base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> _BaseOutput:
        """Return the given hidden states as the base model's output."""
        nothing = dict.fromkeys(("past_key_values", "hidden_states", "attentions", "cross_attentions", "router_logits"))
        return _BaseOutput(last_hidden_state=self.value, **nothing)


class _BaseOutput(SimpleNamespace):
    """A base model's output, whose first item some heads read by its index."""

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        value: Tensor = self.last_hidden_state
        return value


class _HostCopies(TorchFunctionMode):
    """Detects tensors that are created on the host and moved to the model, which a CUDA graph cannot capture.

    Hybrid classes ask whether the probe's mask hides anything, which meta tensors cannot tell: it hides nothing.
    """

    is_any = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.all and args[0].is_meta:
            return True
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_meta:
            is_moved = function is Tensor.to and not args[0].is_meta
            self.is_any |= is_moved or function in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
        return made


@contextmanager
def _probing(calls: list[_Call]) -> Iterator[None]:
    """Let `_record` add to `calls`. Some classes do not hand arguments of a forward pass on to their attention."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


def _layers_name(base: nn.Module, num_layers: int) -> str:
    """Return the name of the list of layers within a base model. Raises _Unsupported."""
    for name, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name
    raise _Unsupported(f"it has no list of {num_layers} layers")


def _short(error: Exception) -> str:
    """Return the beginning of an error's message: transformers' may list all classes that it has."""
    return " ".join(str(error).split())[:200]


def _check(config: Any, base: nn.Module, calls: list[_Call]) -> None:
    """Check that every layer attends exactly once, with equal shapes, and that nothing else mixes tokens."""
    layers = [call.layer for call in calls]
    if layers != list(range(config.num_hidden_layers)):
        raise _Unsupported(f"{len(set(layers))} of its {config.num_hidden_layers} layers attend, some not just once")
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        raise _Unsupported(f"layers of different (heads, key-value heads, head width): {sorted(shapes)}")
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in base.modules()):  # RoBERTa and its kin
        raise _Unsupported("positions that are counted from the padding token's id are not implemented")
    convolutions = [name for name, module in base.named_modules() if isinstance(module, nn.Conv1d)]
    if convolutions:
        raise _Unsupported(f"convolutions over tokens ({convolutions[0]}) are not implemented")


def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **arguments: Any
) -> tuple[Tensor, None]:
    """Record a call of the attention function ([1, H, n, d] each). Raises _Unsupported."""
    for name in ("scaling", "dropout"):
        arguments.pop(name, None)
    given = {name for name, argument in arguments.items() if argument is not None and argument is not False}
    if given - _HANDLED:
        raise _Unsupported(f"attention with {', '.join(sorted(given - _HANDLED))} is not implemented")
    if key.shape[-1] != value.shape[-1]:
        raise _Unsupported(f"keys of {key.shape[-1]} and values of {value.shape[-1]} (multi-head latent attention)")
    if not getattr(module, "is_causal", True):
        raise _Unsupported("attention that looks ahead is not implemented")
    if not isinstance(attention_mask, _Window) or not isinstance(getattr(module, "layer_idx", None), int):
        raise _Unsupported("attention that does not say its layer and mask is not implemented")
    _calls.get().append(
        _Call(
            layer=module.layer_idx,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            window=attention_mask.size,
            module=module,
        )
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


@dataclass(frozen=True, slots=True)
class _Window:
    """Represents a mask by the number of visible positions, the token itself included; None = all before it."""

    size: int | None


_GRID = 1 << 20
"""Number of keys on which a mask is tested; no window is longer."""


def _window_of(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> _Window:
    """Convert a class' mask rule to a window by evaluating it on whole rows. Raises _Unsupported."""
    with torch.device("cpu"):
        zero, keys = torch.zeros((), dtype=torch.long), torch.arange(_GRID)

        def row(query: int) -> Tensor:
            return mask_function(zero, zero, zero + query, keys).expand(_GRID)

        seen = int(row(_GRID - 1).sum())
        size = None if seen == _GRID else seen
        for query in (0, 5, 1000, _GRID // 2 + 1, _GRID - 1):
            expected = (keys <= query) & (keys > query - seen)
            if not torch.equal(row(query), expected):
                raise _Unsupported("a mask that is neither causal nor a sliding window is not implemented")
        return _Window(size)


def _spec(config: Any, plan: dict[str, str], observed: _Observed, raw: dict[str, Any], path: Path) -> TransformersSpec:
    first, positions = observed.calls[0], reach(config)
    return TransformersSpec(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        num_mtp_layers=num_mtp_layers(raw) if config.model_type in _WITH_MTP else 0,
        hidden_size=config.hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        intermediate_size=getattr(config, "intermediate_size", None) or config.hidden_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 0.0),
        tie_embeddings=observed.tie_embeddings,
        windows=tuple(call.window for call in observed.calls),
        max_position_embeddings=positions.default,
        max_scaled_positions=positions.most,
        dtype=_dtype(raw),
        # Gemma-3n thresholds activations by their mean over the full inner width, of which a rank has a part.
        can_split=bool(plan) and not any(getattr(config, "activation_sparsity_pattern", None) or ()),
        eos_token_ids=eos_ids(raw, raw.get("text_config") or {}, read_json(path / "generation_config.json")),
        expert_share=_expert_share(config),
        class_name=observed.class_name,
        tp_plan=tuple(plan.items()),
        layers_name=observed.layers_name,
        attention_name=observed.attention_name,
        has_experts=observed.has_experts,
        copies_from_host=observed.copies_from_host,
        has_taps=observed.hidden_dims == 3,
    )


def _expert_share(config: Any) -> float:
    """Return k / E if each row uses k of E experts, by the configurations' names for these."""
    chosen, total = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
        for names in (_EXPERTS_PER_ROW, _NUM_EXPERTS)
    )
    return chosen / total if chosen and total else 1.0


def _dtype(raw: dict[str, Any]) -> str:
    text = raw.get("text_config") or {}
    name = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")


def _refusal(found: object, reason: str, path: Path) -> ValueError:
    return ValueError(
        f"{path}: architecture {found!r} is not supported: {reason}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}, "
        "and classes of transformers whose attention can be replaced"
    )
