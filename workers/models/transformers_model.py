"""The transformers backend: every other architecture runs in transformers' own model class.

The class defines the model. We supply its attention (`transformers_attention`), this rank's share of the weights and
the reductions between ranks (`transformers_load`). Its cache, generation, tensor parallelism and masks are not used.
Logits come from its ForCausalLM.forward with our hidden states, which includes the model's scaling and capping of
logits; both are elementwise, so they also work on a vocabulary shard.

A step takes 1.6 to 1.7 times as long as in `workers.models.decoder` (the bundled target, 1 and 17 rows, one CPU thread,
2026-11).
Legend: N packed rows, D hidden width, V vocabulary, W = ceil(V / T) columns of a logits shard.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.models.config_json import read_json
from workers.models.layers import RankWeights
from workers.models.specs import TransformersSpec
from workers.models.transformers_attention import AttentionStep, attending, register
from workers.models.transformers_load import Shares, fill, skeleton
from workers.models.transformers_spec import TESTED, GivenHidden, model_config
from workers.types import Hidden

logger = logging.getLogger(__name__)


class TransformersDecoder(BaseDecoder):
    """A decoder with transformers' layers.

    max_model_len: None = the model's default. Selects the frequencies of a "longrope" model, see
    `workers.models.transformers_spec.freeze_rope`. Raises ValueError if the model has no single residual stream to tap,
    or a tensor is missing, unknown or of another shape.
    """

    spec: TransformersSpec

    @torch.inference_mode()
    def __init__(
        self,
        weights: RankWeights,
        spec: TransformersSpec,
        tap_layers: tuple[int, ...] = (),
        max_model_len: int | None = None,
    ) -> None:
        if tap_layers and not spec.has_taps:
            raise ValueError(f"{spec.class_name} has no single residual stream that a feature could be taken from")
        length = max_model_len or spec.max_position_embeddings
        model = skeleton(model_config(weights.path, spec.family), register(), weights.dtype, length)
        shares = Shares(spec, model.base_model, weights.tp)
        is_composite = "text_config" in read_json(weights.path / "config.json")
        fill(model, weights, shares, is_composite=is_composite)
        logger.info("%s runs in transformers' own class", spec.class_name)
        if spec.family not in TESTED:
            logger.warning("no test compares %s with transformers: check its output before you rely on it", spec.family)
        super().__init__(weights, spec, shares.heads, tap_layers)
        self._base = model.base_model
        self._captured: dict[int, Tensor] = {}
        self._install_taps()
        shares.install_hooks(self._base)
        self._given_hidden = GivenHidden.put_into(model)
        self._head = model
        if self.device.type == "cuda" and not self.can_be_captured:
            logger.info("%s: no CUDA graphs, because a forward pass synchronizes with the host", spec.class_name)

    @property
    def can_be_captured(self) -> bool:
        """True if a forward pass on CUDA does not synchronize with the host.

        torch's grouped matrix product synchronizes except for bfloat16 on compute capability 9 and 10.
        """
        if self.spec.copies_from_host:
            return False
        if not self.spec.has_experts:
            return True
        return self.dtype == torch.bfloat16 and torch.cuda.get_device_capability(self.device)[0] in (9, 10)

    @torch.inference_mode()
    def forward(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, kv: KVPool) -> Hidden:
        """See `BaseDecoder.forward`."""
        step = AttentionStep(plan, kv, self.kernels, self.spec.windows)
        # The class sees one long sequence; only attention distinguishes the requests.
        with attending(step):
            output = self._base(input_ids=tokens_N[None].long(), position_ids=positions_N[None].long(), use_cache=False)
        taps_N3D = torch.cat([self._captured[tap] for tap in self.tap_layers], dim=-1) if self.tap_layers else None
        self._captured.clear()
        return Hidden(output.last_hidden_state[0], taps_N3D)

    @property
    def logits_dtype(self) -> torch.dtype:
        """See `BaseDecoder.logits_dtype`: some classes go on in float32 behind the head."""
        return torch.float32

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See `BaseDecoder.logits`."""
        self._given_hidden.value = hidden_ND[None]
        logits_NW = self._head(**GivenHidden.INPUTS).logits[0].float()
        num_padding = self._shard_width - logits_NW.shape[-1]
        return F.pad(logits_NW, (0, num_padding), value=float("-inf")) if num_padding else logits_NW

    def _install_taps(self) -> None:
        """Install hooks that capture the inputs of the tapped layers (for tap L, the last layer's output)."""

        def before(tap: int) -> Any:
            def hook(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                self._captured[tap] = (inputs[0] if inputs else keywords["hidden_states"])[0]

            return hook

        def after(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            last = output if isinstance(output, Tensor) else output[0]
            self._captured[self.spec.num_layers] = last[0]

        layers = self._base.get_submodule(self.spec.layers_name)
        for tap in set(self.tap_layers):  # in small models, taps may coincide
            if tap < self.spec.num_layers:
                layers[tap].register_forward_pre_hook(before(tap), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(after)
