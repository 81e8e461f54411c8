"""Multi-head latent attention, as DeepSeek-V3 has it, in the absorbed form: keys and values are never computed.

    c | k       = x W_kv_a                          c = norm(c), k = rope(k): a token's entry in the KV cache
    qn | qr     = norm(x W_q_a) W_q_b               per head; without a latent of their own, x W_q
    W_uk | W_uv = W_kv_b                            per head: the key qn is compared with is W_uk c, the value is W_uv c
    q           = qn W_uk | rope(qr)                so q . (c | k) is the score
    out         = concat(W_uv sum(p c)) W_o         p = softmax(scores), the ancestors' and the prefix'

So attention has one key-value head that all query heads share, whose values are the first part of its keys.

Legend: N packed rows, D hidden width, H heads, n and r widths of a query head's two parts, c width of a latent,
e = c + r width of an entry, v width of a value. A rank has its part of the heads, and all of every entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.kernels.pointwise import Rotation
from workers.kernels.select import TORCH, AttentionPlan
from workers.kv_cache import KVPool
from workers.models.layers import RankWeights, check_shape, fused_linear, row_parallel_linear
from workers.models.specs import ModelSpec, latent_shapes

_EPS = 1e-6
"""The epsilon of the norms of latents, whatever that of the others is."""


class LatentAttention:
    """The latent attention of one layer.

    It reads this rank's share of `prefix`{q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm,
    kv_b_proj, o_proj}, or of {q_proj} in place of the first three. Attention itself runs in torch everywhere. Raises
    ValueError for a tensor that is missing or has another shape.
    """

    def __init__(self, weights: RankWeights, prefix: str, spec: ModelSpec) -> None:
        latent = spec.latent
        assert latent is not None
        self.tp, self.kernels, self.eps, self._scale = weights.tp, weights.kernels, spec.rms_norm_eps, latent.scale
        rank, size = self.tp.rank, self.tp.size
        self._num_heads = spec.num_heads // size
        self._rank, self._plain_dim, self._rope_dim = latent.rank, latent.plain_dim, latent.rope_dim
        shapes = latent_shapes(latent, spec.num_heads, spec.hidden_size)
        norms = {"kv_a_layernorm": latent.rank} | ({"q_a_layernorm": latent.query_rank} if latent.query_rank else {})
        for name, shape in (shapes | {name: (width,) for name, width in norms.items()}).items():
            fields = "hidden_size, num_attention_heads, q_lora_rank, kv_lora_rank and qk_*_head_dim, v_head_dim"
            check_shape(weights, f"{prefix}{name}.weight", shape, fields)

        def halves(plain_dim: int) -> Tensor:
            """Return the rows of plain widths, then those of rotated ones, which come in pairs or in halves."""
            rope_r = torch.arange(latent.rope_dim, device=weights.device)
            if latent.is_interleaved:
                rope_r = rope_r.view(-1, 2).t().flatten()
            return torch.cat((torch.arange(plain_dim, device=weights.device), plain_dim + rope_r))

        by_head, whole, of_head = (0, rank, size), (0, 0, 1), halves(latent.plain_dim)
        row_O = torch.cat([head * len(of_head) + of_head for head in range(self._num_heads)])
        first, self._query_norm = {"q_proj": by_head}, None
        if latent.query_rank is not None:
            self._query_norm = weights.get(f"{prefix}q_a_layernorm.weight")
            self._query_up = fused_linear(weights, {f"{prefix}q_b_proj": by_head}, has_bias=False, row_O=row_O)
            first, row_O = {"q_a_proj": whole}, torch.arange(latent.query_rank, device=weights.device)
        self._widths = [len(row_O), latent.rank, latent.rope_dim]
        parts = {f"{prefix}{name}": part for name, part in (first | {"kv_a_proj_with_mqa": whole}).items()}
        row_O = torch.cat((row_O, len(row_O) + halves(latent.rank)))
        self._down = fused_linear(weights, parts, has_bias=False, row_O=row_O)
        self._norm_c = weights.get(f"{prefix}kv_a_layernorm.weight")
        up_HXc = weights.get(f"{prefix}kv_b_proj.weight", *by_head).unflatten(0, (self._num_heads, -1))
        self._key_Hnc = up_HXc[:, : latent.plain_dim].contiguous()
        self._value_Hcv = up_HXc[:, latent.plain_dim :].transpose(1, 2).contiguous()
        self._out = row_parallel_linear(weights, f"{prefix}o_proj", has_bias=False)

    def __call__(self, x_ND: Tensor, rotation: Rotation, plan: AttentionPlan, kv: KVPool, layer: int) -> Tensor:
        """Attend from normalized x_ND; return [N, D] summed over the ranks, without the residual. Writes entries."""
        q_NX, c_Nc, k_Nr = self._down(x_ND).split(self._widths, dim=-1)
        if self._query_norm is not None:
            q_NX = self._query_up(self.kernels.rms_norm(q_NX, self._query_norm, _EPS))
        q_NHq, H, c = q_NX.unflatten(1, (self._num_heads, -1)), self._num_heads, self._rank
        # The entry as one more head, so that it is rotated together with the queries.
        qe_NHe = x_ND.new_empty(len(x_ND), H + 1, c + self._rope_dim)
        qe_NHe[:, :H, :c] = torch.bmm(q_NHq[..., : self._plain_dim].transpose(0, 1), self._key_Hnc).transpose(0, 1)
        qe_NHe[:, H, :c] = self.kernels.rms_norm(c_Nc, self._norm_c, _EPS)
        qe_NHe[:, :H, c:] = q_NHq[..., self._plain_dim :]
        qe_NHe[:, H, c:] = k_Nr
        self.kernels.rotate_(qe_NHe[..., c:], rotation)
        kv.write(layer, qe_NHe[:, None, H:], plan.write_slots_N)
        mixed_NX = TORCH.tree_attention(qe_NHe[:, :H], kv.layer(layer), plan, self._scale)
        mixed_HNc = mixed_NX.unflatten(1, (H, -1))[..., :c].transpose(0, 1)
        out_NX = torch.bmm(mixed_HNc, self._value_Hcv).transpose(0, 1).flatten(1)
        return self.tp.all_reduce_(self._out(out_NX))
