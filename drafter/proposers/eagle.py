"""EAGLE-1/2 and multi-token prediction heads: fuse a token with the feature before it, then run decoder layers.

Legend: M packed rows, H hidden width (the target's). For a row with token t and feature g:

    x      = fc(concat(norm(embed(t)), norm(g)))       norms and order: see workers.models.fc_head_format
    out    = norm(layers(x))                           EAGLE has no norm
    logits = lm_head(out);  the feature handed to children is `out`

g is the target's last hidden state, after its final norm, at the token before t; for tree nodes the parent's `out`.
Alignment is EAGLE-3's: the entry for token j lives in KV slot j with rotary position j - 1; slot 0 stays empty.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.proposers.feature_head import FeatureHead, name_in_target
from workers.kernels.linear import Linear
from workers.kernels.select import AttentionPlan
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.decoder import DecoderLayer
from workers.models.layers import RankWeights, VocabHead, gather_vocab, norm_weight
from workers.models.specs import FcHeadSpec


class FcHead(FeatureHead):
    """One rank's shard of a head."""

    def __init__(self, spec: FcHeadSpec, weights: RankWeights, target: Weights) -> None:
        layers = spec.layers
        shared = [name_in_target(target, name) for name in ("model.embed_tokens.weight", "lm_head.weight")]
        embedding = _first((weights, f"{spec.prefix}embed_tokens.weight"), (target, shared[0]))
        output = _first((weights, f"{spec.prefix}lm_head.weight"), (target, shared[1]), embedding)
        for (source, name), wanted in (
            (embedding, (layers.vocab_size, layers.hidden_size)),
            (output, (layers.vocab_size, layers.hidden_size)),
            ((weights, f"{spec.fc}.weight"), (layers.hidden_size, 2 * layers.hidden_size)),
        ):
            if source.shape(name) != wanted:
                raise ValueError(f"{source.path}: {name} is {source.shape(name)}, the head needs {wanted}")

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else norm_weight(weights, f"{name}.weight", layers)

        super().__init__(weights, layers, embedding[0].get(embedding[1]))
        self.spec = spec
        self._embedding_norm_H, self._feature_norm_H = norm(spec.embedding_norm), norm(spec.feature_norm)
        self._fc = Linear(weights.get(f"{spec.fc}.weight"), weights.get(f"{spec.fc}.bias") if spec.fc_bias else None)
        self._layers = tuple(
            DecoderLayer(weights, prefix, layers, window=window, has_input_norm=index > 0 or spec.first_layer_norm)
            for index, (prefix, window) in enumerate(zip(spec.layer_prefixes, layers.windows, strict=True))
        )
        self._final_norm_H = norm(spec.final_norm)
        if output == embedding:
            self._head = VocabHead.tied(self._embedding_VH, self.tp)
        else:
            self._head = VocabHead.load(*output, layers.vocab_size, self.tp)

    def is_foreign(self, name: str) -> bool:
        """See `DraftHead`: with MTP it is the target's checkpoint. DeepSeek-V3's head is a copy of the target's."""
        return not name.startswith(self.spec.prefix) or name.endswith("shared_head.head.weight")

    @torch.inference_mode()
    def forward(
        self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: AttentionPlan, kv: KVPool
    ) -> Tensor:
        """See `FeatureHead`."""
        e_MH = self._norm(F.embedding(tokens_M, self._embedding_VH), self._embedding_norm_H)
        g_MH = self._norm(features_MH.to(self.dtype), self._feature_norm_H)
        x_MH = self._fc(torch.cat((g_MH, e_MH) if self.spec.feature_first else (e_MH, g_MH), dim=-1))
        rotation = self._rope(positions_M)
        for index, layer in enumerate(self._layers):
            x_MH = layer(x_MH, rotation, plan, kv, index)
        return self._norm(x_MH, self._final_norm_H)

    @torch.inference_mode()
    def logits(self, hidden_MH: Tensor) -> Tensor:
        """See `FeatureHead`."""
        return gather_vocab(self._head(hidden_MH), self.tp, self.vocab.target_size)

    def _norm(self, x_MH: Tensor, weight_H: Tensor | None) -> Tensor:
        return x_MH if weight_H is None else self.kernels.rms_norm(x_MH, weight_H, self.spec.layers.rms_norm_eps)


def _first(*places: tuple[Weights, str]) -> tuple[Weights, str]:
    """Return the first of these tensors that is stored, else the last; loading that one raises the error."""
    return next(((source, name) for source, name in places if source.has(name)), places[-1])
