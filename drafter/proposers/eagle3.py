"""The EAGLE-3 head: a decoder layer (rarely more) that drafts the next token from features of the target.

    Eagle3Head.load(spec, path, target_path, tp=SINGLE, device="cpu", dtype=float32) -> Eagle3Head        .spec
        .plan(metadata, page_size) -> AttentionPlan                        slot 0 masked
        .forward(tokens_M, features_MH, positions_M, plan, kv) -> hidden_MH  the next step's features
        .logits(hidden_MH) -> [M, draft_vocab] float32                     gathered over `tp`
        .vocab                                                             target ids of the draft vocabulary
        .new_kv_pool(num_slots) -> KVPool

Legend: M packed rows, H draft hidden width. For a row with token t and feature g (Li et al., EAGLE-3, and its code):

    x   = concat(input_layernorm(embed(t)), hidden_norm(g))        2 H wide, embedding first
    r   = g + attention(x)                                         the residual is g, never the embedding
    out = r + mlp(post_attention_layernorm(r))
    out = plain decoder layers(out), if the head has more than one
    logits = lm_head(norm(out));  the feature handed to children is `out`, before `norm`

g is fc(target features of the token before t) for committed tokens, and the parent's own `out` for tree nodes. The
caller ensures the alignment: the entry for token j lives in KV slot j with rotary position j - 1; slot 0 stays empty.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drafter.proposers.feature_head import FeatureHead, load_embedding, load_vocab_head
from workers.kernels.select import TORCH, AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.decoder import DecoderLayer, is_legacy, load_attention, load_layer, load_mlp
from workers.models.eagle3_format import FUSION_TENSORS, UNUSED_TENSORS, load_target_ids, open_eagle3
from workers.models.layers import SINGLE, Attention, Mlp, TensorParallel, VocabHead, gather_vocab
from workers.models.specs import Eagle3Spec, check_parallel


class Eagle3Head(FeatureHead):
    """One rank's shard of an EAGLE-3 head. Build it with `load`."""

    def __init__(
        self,
        *,
        spec: Eagle3Spec,
        tp: TensorParallel,
        embedding_VH: Tensor,
        input_norm_H: Tensor,
        hidden_norm_H: Tensor,
        attention: Attention,
        post_norm_H: Tensor,
        mlp: Mlp,
        more_layers: tuple[DecoderLayer, ...],
        final_norm_H: Tensor,
        head: VocabHead,
        target_ids: Tensor,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__(spec, embedding_VH=embedding_VH, target_ids=target_ids, tp=tp, kernels=kernels)
        self.spec = spec
        self._input_norm_H = input_norm_H
        self._hidden_norm_H = hidden_norm_H
        self._attention = attention
        self._post_norm_H = post_norm_H
        self._mlp = mlp
        self._more_layers = more_layers
        self._final_norm_H = final_norm_H
        self._head = head

    @staticmethod
    @torch.inference_mode()
    def load(
        spec: Eagle3Spec,
        path: Path | str,
        target_path: Path | str,
        tp: TensorParallel = SINGLE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = TORCH,
    ) -> Eagle3Head:
        """Load this rank's shard; a head without its own embedding or vocabulary head uses the target's.

        Raises:
            ValueError: tp.size does not divide the attention heads, or a tensor is missing or unknown.
        """
        check_parallel(spec, tp.size)
        weights = open_eagle3(path, dtype, device, kernels)
        spec = replace(spec, qk_norm=spec.qk_norm or weights.has("midlayer.self_attn.q_norm.weight"))
        target = Weights(target_path, dtype, device)
        layer = "midlayer."
        head = Eagle3Head(
            spec=spec,
            tp=tp,
            embedding_VH=load_embedding(weights, target, spec),
            input_norm_H=weights.get(f"{layer}input_layernorm.weight"),
            hidden_norm_H=weights.get(f"{layer}hidden_norm.weight"),
            attention=load_attention(
                weights,
                f"{layer}self_attn.",
                spec,
                tp,
                in_width=2 * spec.hidden_size,
                window=spec.windows[0],
                kernels=kernels,
            ),
            post_norm_H=weights.get(f"{layer}post_attention_layernorm.weight"),
            mlp=load_mlp(weights, f"{layer}mlp.", spec, tp, kernels=kernels),
            more_layers=tuple(
                load_layer(weights, f"layers.{i}.", spec, tp, window=spec.windows[i], kernels=kernels)
                for i in range(1, spec.num_layers)
            ),
            final_norm_H=weights.get("norm.weight"),
            head=load_vocab_head(weights, target, spec, spec.draft_vocab_size, tp),
            target_ids=load_target_ids(weights, spec.draft_vocab_size, spec.vocab_size),
            kernels=kernels,
        )
        weights.finish(allowed=lambda name: name in FUSION_TENSORS + UNUSED_TENSORS or is_legacy(name))
        return head

    @torch.inference_mode()
    def forward(
        self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: AttentionPlan, kv: KVPool
    ) -> Tensor:
        """See `FeatureHead`."""
        spec, eps, kernels = self.spec, self.spec.rms_norm_eps, self.kernels
        g_MH = features_MH.to(self.dtype)
        x_M2H, h_MH = kernels.head_input(
            tokens_M, self._embedding_VH, self._input_norm_H, g_MH, self._hidden_norm_H, eps
        )
        residual_MH = h_MH if spec.norm_before_residual else g_MH
        rotation = self._rope(positions_M)
        delta_MH = self._attention(x_M2H, rotation, plan, kv, 0)
        r_MH, normed_MH = kernels.add_rms_norm(residual_MH, delta_MH, self._post_norm_H, eps)
        out_MH = r_MH + self._mlp(normed_MH)
        for index, layer in enumerate(self._more_layers, start=1):
            out_MH = layer(out_MH, rotation, plan, kv, index)
        return kernels.rms_norm(out_MH, self._final_norm_H, eps) if spec.norm_output else out_MH

    @torch.inference_mode()
    def logits(self, hidden_MH: Tensor) -> Tensor:
        """See `FeatureHead`."""
        if not self.spec.norm_output:
            hidden_MH = self.kernels.rms_norm(hidden_MH, self._final_norm_H, self.spec.rms_norm_eps)
        return gather_vocab(self._head(hidden_MH), self.tp, self.spec.draft_vocab_size)
