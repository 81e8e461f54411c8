"""EAGLE-1/2 and multi-token prediction heads: fuse a token with the feature before it, then run decoder layers.

    FcHead.load(spec, path, target_path, tp=SINGLE, device="cpu", dtype=float32) -> FcHead
        .plan, .forward, .logits, .vocab, .new_kv_pool         as `drafter.proposers.eagle3.Eagle3Head`

Legend: M packed rows, H hidden width (the target's). For a row with token t and feature g:

    x      = fc(concat(norm(embed(t)), norm(g)))       norms and order: see workers.models.fc_head_format
    out    = norm(layers(x))                           EAGLE has no norm
    logits = lm_head(out);  the feature handed to children is `out`

g is the target's last hidden state, after its final norm, at the token before t; for tree nodes the parent's `out`.
Alignment is EAGLE-3's: the entry for token j lives in KV slot j with rotary position j - 1; slot 0 stays empty.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.proposers.feature_head import FeatureHead, name_in_target
from workers.kernels.linear import Linear
from workers.kernels.select import TORCH, AttentionPlan, Kernels
from workers.kv_cache import KVPool
from workers.models.checkpoint import Weights
from workers.models.decoder import DecoderLayer, is_legacy, load_layer
from workers.models.layers import SINGLE, TensorParallel, VocabHead, gather_vocab, open_weights
from workers.models.specs import FcHeadSpec, check_parallel


class FcHead(FeatureHead):
    """One rank's shard of a head. Build it with `load`."""

    def __init__(
        self,
        *,
        spec: FcHeadSpec,
        tp: TensorParallel,
        embedding_VH: Tensor,
        embedding_norm_H: Tensor | None,
        feature_norm_H: Tensor | None,
        fc: Linear,
        layers: tuple[DecoderLayer, ...],
        final_norm_H: Tensor | None,
        head: VocabHead,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__(spec.layers, embedding_VH=embedding_VH, target_ids=None, tp=tp, kernels=kernels)
        self.spec = spec
        self._embedding_norm_H = embedding_norm_H
        self._feature_norm_H = feature_norm_H
        self._fc = fc
        self._layers = layers
        self._final_norm_H = final_norm_H
        self._head = head

    @staticmethod
    @torch.inference_mode()
    def load(
        spec: FcHeadSpec,
        path: Path | str,
        target_path: Path | str,
        tp: TensorParallel = SINGLE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = TORCH,
    ) -> FcHead:
        """Load this rank's shard; a head without its own embedding or vocabulary head uses the target's.

        Raises:
            ValueError: tp.size does not divide the attention heads, or a tensor is missing or, under the head's prefix,
                unknown.
        """
        layers = spec.layers
        check_parallel(layers, tp.size)
        weights, target = open_weights(path, dtype, device, kernels), Weights(target_path, dtype, device)
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
            return None if name is None else weights.get(f"{name}.weight")

        embedding_VH = embedding[0].get(embedding[1])
        head = FcHead(
            spec=spec,
            tp=tp,
            embedding_VH=embedding_VH,
            embedding_norm_H=norm(spec.embedding_norm),
            feature_norm_H=norm(spec.feature_norm),
            fc=Linear(weights.get(f"{spec.fc}.weight"), weights.get(f"{spec.fc}.bias") if spec.fc_bias else None),
            layers=tuple(
                load_layer(
                    weights,
                    prefix,
                    layers,
                    tp,
                    window=layers.windows[index],
                    has_input_norm=index > 0 or spec.first_layer_norm,
                    kernels=kernels,
                )
                for index, prefix in enumerate(spec.layer_prefixes)
            ),
            final_norm_H=norm(spec.final_norm),
            head=VocabHead.tied(embedding_VH, tp)
            if output == embedding
            else VocabHead.load(*output, layers.vocab_size, tp),
            kernels=kernels,
        )
        weights.finish(allowed=lambda name: not name.startswith(spec.prefix) or is_legacy(name))
        return head

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
