"""The EAGLE-3 head: a decoder layer (rarely more) that drafts the next token from features of the target.

Legend: M packed rows, H draft hidden width. For a row with token t and feature g (Li et al., EAGLE-3, and its code):

    x   = concat(input_layernorm(embed(t)), hidden_norm(g))        2 H wide, embedding first
    r   = g + attention(x)                                         the residual is g, never the embedding
    out = r + mlp(post_attention_layernorm(r))
    out = plain decoder layers(out), if the head has more than one
    logits = lm_head(norm(out));  the feature handed to children is `out`, before `norm`

g is fc(target features of the token before t) for committed tokens, and the parent's own `out` for tree nodes. The
caller ensures the alignment: the entry for token j lives in KV slot j with rotary position j - 1; slot 0 stays empty.

P-EAGLE (AWS; vllm-project/speculators) is the same network, with D - 1 rows of a mask token behind the newest token's.
Their feature is learned. Attention is causal, so the newest token's row predicts depth 1, as in EAGLE-3, and each mask
row the next depth: one distribution per depth, that of its most likely path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafter.proposers.feature_head import FeatureHead, load_embedding, load_target_ids, load_vocab_head
from drafter.proposers.one_pass import Block, OnePassHead, causal
from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.decoder import DecoderLayer
from workers.models.eagle3_format import canonical_name
from workers.models.fusion import is_of_eagle3_fusion, load_fusion
from workers.models.layers import Attention, Mlp, RankWeights, gather_vocab
from workers.models.specs import Eagle3Spec
from workers.types import AttentionMetadata


class Eagle3Head(FeatureHead):
    """One rank's shard of an EAGLE-3 head."""

    canonical_name = staticmethod(canonical_name)

    def __init__(self, spec: Eagle3Spec, weights: RankWeights, target: Weights) -> None:
        has_qk_norm = spec.layers.qk_norm or weights.has("midlayer.self_attn.q_norm.weight")
        layers = replace(spec.layers, qk_norm=has_qk_norm)
        super().__init__(
            weights,
            layers,
            load_embedding(weights, target, layers),
            load_target_ids(weights, spec.draft_vocab_size, layers.vocab_size),
        )
        self.spec = replace(spec, layers=layers)
        self._input_norm_H = weights.get("midlayer.input_layernorm.weight")
        self._hidden_norm_H = weights.get("midlayer.hidden_norm.weight")
        self._attention = Attention(
            weights, "midlayer.self_attn.", layers, in_width=2 * layers.hidden_size, window=layers.windows[0]
        )
        self._post_norm_H = weights.get("midlayer.post_attention_layernorm.weight")
        self._mlp = Mlp(weights, "midlayer.mlp.", layers)
        self._more_layers = tuple(
            DecoderLayer(weights, f"layers.{i}.", layers, window=layers.windows[i]) for i in range(1, layers.num_layers)
        )
        self._final_norm_H = weights.get("norm.weight")
        self._head = load_vocab_head(weights, target, layers, spec.draft_vocab_size)

    def is_foreign(self, name: str) -> bool:
        """See `DraftHead`. The target-to-draft mask is redundant given d2t."""
        return is_of_eagle3_fusion(name) or name == "t2d"

    @torch.inference_mode()
    def forward(
        self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: AttentionPlan, kv: KVPool
    ) -> Tensor:
        """See `FeatureHead`."""
        spec, eps, kernels = self.spec, self.spec.layers.rms_norm_eps, self.kernels
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
            hidden_MH = self.kernels.rms_norm(hidden_MH, self._final_norm_H, self.spec.layers.rms_norm_eps)
        return gather_vocab(self._head(hidden_MH), self.tp, self.spec.draft_vocab_size)


class PEagleHead(Eagle3Head, OnePassHead):
    """One rank's shard of a P-EAGLE head; `set_depth` follows."""

    def __init__(self, spec: Eagle3Spec, weights: RankWeights, target: Weights) -> None:
        super().__init__(spec, weights, target)
        fusion = load_fusion(weights.path, spec, weights.device, weights.dtype)
        assert fusion is not None and spec.mask_token_id is not None
        self.mask_token_id = spec.mask_token_id
        mask_1X, width = weights.get("mask_hidden").view(1, -1), spec.matrix_shapes()["fc.weight"][1]
        if mask_1X.shape[1] != width:
            raise ValueError(f"{weights.path}: mask_hidden has {mask_1X.shape[1]} values, this target needs {width}")
        self.feature_1H = fusion(mask_1X)

    def set_depth(self, depth: int) -> None:
        """Draft so many tokens in a pass: as many as trees have levels, at most what its spec says."""
        self.depth, self.num_behind = depth, depth - 1

    def plan(self, metadata: AttentionMetadata, page_size: int, into: Any = None, **options: Any) -> AttentionPlan:
        """See `PagedModel`."""
        return super().plan(causal(metadata), page_size, into, **options)

    @torch.inference_mode()
    def block(self, hidden_GDH: Tensor) -> Block:
        """See `OnePassHead`."""
        return Block(hidden_GDH, self.logits(hidden_GDH.flatten(0, 1)).unflatten(0, hidden_GDH.shape[:2]))
