"""Every other architecture: transformers' own model class behind the interface of `workers.models.decoder.Decoder`.

    TransformersDecoder.load(source, spec, tp=SINGLE, device="cpu", dtype=float32, tap_layers=(), kernels=TORCH,
                             max_model_len=None)
        .plan  .new_kv_pool  .forward  .logits  .full_logits        as Decoder has them

The class defines the model; we give it attention (`transformers_attention`), its share of the weights, and the
reductions between ranks (`transformers_load`). Its cache, generation, tensor parallelism and masks are not used. Logits
come from its own ForCausalLM.forward, given hidden states in place of the base model's, so that scaling and capping are
its own; these act on every logit by itself, so a vocabulary shard goes through them like the whole.

A step costs 1.6 to 1.7 times what it costs in `workers.models.decoder` (the bundled target through both, 1 and 17 rows,
one CPU thread, 2026-11).
Legend: N packed rows, D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.kernels.select import TORCH, AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.config_json import read_json
from workers.models.layers import SINGLE, TensorParallel, gather_vocab, shard_vocab
from workers.models.specs import TransformersSpec, check_parallel
from workers.models.transformers_attention import AttentionStep, register
from workers.models.transformers_load import Shares, fill, skeleton
from workers.models.transformers_spec import TESTED, model_config
from workers.types import AttentionMetadata, Hidden

logger = logging.getLogger(__name__)


class TransformersDecoder:
    """A decoder-only model of transformers over flat packed tokens and paged KV. Build it with `load`."""

    def __init__(
        self,
        *,
        model: Any,
        spec: TransformersSpec,
        shares: Shares,
        tap_layers: tuple[int, ...],
        kernels: Kernels,
    ) -> None:
        embedding: Tensor = model.get_input_embeddings().weight
        self.spec = spec
        self.tp = shares.tp
        self.heads = shares.heads
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.tap_layers = tap_layers
        self.kernels = kernels
        start, end, self._shard_width = shard_vocab(spec.vocab_size, self.tp)
        self.vocab_range = (start, end)
        self._base = model.base_model
        self._captured: dict[int, Tensor] = {}
        self._install_taps()
        shares.install_hooks(self._base)
        self._given_hidden = _GivenHidden()
        setattr(model, model.base_model_prefix, self._given_hidden)
        self._head = model

    @staticmethod
    @torch.inference_mode()
    def load(
        source: Path | str | Weights,
        spec: TransformersSpec,
        tp: TensorParallel = SINGLE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tap_layers: tuple[int, ...] = (),
        kernels: Kernels = TORCH,
        max_model_len: int | None = None,
    ) -> TransformersDecoder:
        """Read this rank's share of a checkpoint folder.

        Args:
            source: the folder, or Weights already opened with the same dtype and device.
            tap_layers: capture the residual stream before these layers (0 .. L), for EAGLE-3.
            kernels: what attention runs on.
            max_model_len: positions that a request may have, None = the model's default; decides on the frequencies of
                a "longrope" model, see `workers.models.transformers_spec.freeze_rope`.

        Raises:
            ValueError: tp.size does not fit; a tap outside the model, or of one without a single residual stream; a
                missing, misshapen or unknown tensor, named.
        """
        check_parallel(spec, tp.size)
        for tap in tap_layers:
            if not 0 <= tap <= spec.num_layers:
                raise ValueError(f"feature layer {tap} is outside a model of {spec.num_layers} layers")
        if tap_layers and not spec.has_taps:
            raise ValueError(f"{spec.class_name} has no single residual stream that a feature could be taken from")
        weights = source if isinstance(source, Weights) else Weights(source, dtype, device)
        length = max_model_len or spec.max_position_embeddings
        model = skeleton(model_config(weights.path, spec.family), register(), dtype, length)
        shares = Shares(spec, model.base_model, tp)
        is_composite = "text_config" in read_json(weights.path / "config.json")
        fill(model, weights, shares, weights.device, dtype, is_composite=is_composite)
        logger.info("%s through transformers' own class", spec.class_name)
        if spec.family not in TESTED:
            logger.warning("no test compares %s with transformers: look at its text before you rely on it", spec.family)
        made = TransformersDecoder(model=model, spec=spec, shares=shares, tap_layers=tuple(tap_layers), kernels=kernels)
        if made.device.type == "cuda" and not made.can_be_captured:
            logger.info("%s: no CUDA graphs, a forward pass asks for something on the host", spec.class_name)
        return made

    def plan(self, metadata: AttentionMetadata, page_size: int, into: Any = None) -> AttentionPlan:
        """Prepare one step's attention for this model's heads, windows, dtype and device. into: see `Kernels.plan`."""
        return self.kernels.plan(
            metadata,
            page_size,
            windows=self.spec.windows,
            group_size=self.heads.num_heads // self.heads.num_kv_heads,
            dtype=self.dtype,
            device=self.device,
            into=into,
        )

    @property
    def can_be_captured(self) -> bool:
        """Whether a forward pass on CUDA asks nothing of the host.

        torch's grouped product counts each expert's rows there, but for bfloat16 on compute capability 9 and 10.
        """
        if self.spec.copies_from_host:
            return False
        if not self.spec.has_experts:
            return True
        return self.dtype == torch.bfloat16 and torch.cuda.get_device_capability(self.device)[0] in (9, 10)

    def new_kv_pool(self, num_slots: int) -> KVPool:
        """A pool for this rank's key-value heads; num_slots = pages (the null page included) * page_size."""
        spec = self.spec
        return KVPool(spec.num_layers, num_slots, self.heads.num_kv_heads, spec.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, kv: KVPool) -> Hidden:
        """One packed pass; writes every row's key and value into `kv` and attends as the plan says.

        Args:
            tokens_N, positions_N: int32 or int64 [N] on the model's device.

        Returns:
            Hidden: final_ND after the final norm; taps_N3D in tap order, or None without taps. Equal on every rank.
        """
        step = AttentionStep(plan, kv, self.kernels, self.spec.windows)
        # One long sequence to the class; whose rows belong together only attention needs to know.
        output = self._base(
            input_ids=tokens_N[None].long(), position_ids=positions_N[None].long(), use_cache=False, secateur_step=step
        )
        taps_N3D = torch.cat([self._captured[tap] for tap in self.tap_layers], dim=-1) if self.tap_layers else None
        self._captured.clear()
        return Hidden(output.last_hidden_state[0], taps_N3D)

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 [N, W] logits of this rank's tokens; columns past the vocabulary's end (if any) are -inf."""
        self._given_hidden.value = hidden_ND[None]
        logits_NW = self._head(input_ids=None, use_cache=False).logits[0].float()
        num_padding = self._shard_width - logits_NW.shape[-1]
        return F.pad(logits_NW, (0, num_padding), value=float("-inf")) if num_padding else logits_NW

    @torch.inference_mode()
    def full_logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 [N, V] logits on every rank; a collective over `tp`."""
        return gather_vocab(self.logits(hidden_ND), self.tp, self.spec.vocab_size)

    def _install_taps(self) -> None:
        """Keep the input of the tapped layers (of tap L: the last layer's output), before any norm."""

        def before(tap: int) -> Any:
            def hook(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                self._captured[tap] = (inputs[0] if inputs else keywords["hidden_states"])[0]

            return hook

        def after(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            last = output if isinstance(output, Tensor) else output[0]
            self._captured[self.spec.num_layers] = last[0]

        for tap in set(self.tap_layers):  # of few layers, taps coincide
            if tap < self.spec.num_layers:
                self._base.layers[tap].register_forward_pre_hook(before(tap), with_kwargs=True)
            else:
                self._base.layers[-1].register_forward_hook(after)


class _GivenHidden(nn.Module):
    """Takes the base model's place when only logits are wanted."""

    value: Tensor

    def forward(self, *_: Any, **__: Any) -> SimpleNamespace:
        nothing = dict.fromkeys(("past_key_values", "hidden_states", "attentions", "router_logits"))
        return SimpleNamespace(last_hidden_state=self.value, **nothing)
