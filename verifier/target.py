"""The target model on one verifier rank: runs a TargetStep, draws the target's own tokens, keeps the EAGLE taps.

Every rank runs the same step. Rank 0 sends it to its peers first and is the only one that learns the drawn tokens.
Legend: N packed rows, R sampled rows, V vocabulary, W shard width, H draft hidden width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from workers.channel import Channel, naming_lost_peers
from workers.eagle3_format import FeatureFusion
from workers.kv import KVPool
from workers.layers import gather_vocab
from workers.model import Decoder
from workers.sampling import draw, needs_whole_rows, shard_best
from workers.types import TargetStep
from workers.wire import Kind


class Target:
    """One rank's share of the target with its KV pool.

    fusion: rank 0's fc of the EAGLE-3 head, applied here so that the drafter is sent H, not 3 D, wide features.
    """

    def __init__(
        self, decoder: Decoder, kv: KVPool, page_size: int, peers: Channel | None, fusion: FeatureFusion | None
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._page_size = page_size
        self._peers = peers
        self._fusion = fusion
        self._role = f"verifier {decoder.tp.rank}"
        self._taps_N3D: Tensor | None = None

    def run(self, step: TargetStep, number: int) -> list[int]:
        """Rank 0: one step on all ranks; returns the token drawn at each sampled row."""
        if self._peers is not None:
            self._peers.send(step, number)
        with naming_lost_peers(self._role, number):
            drawn = self._execute(step)
        assert drawn is not None
        return drawn

    def follow(self) -> None:
        """Other ranks: execute what rank 0 sends until it says stop. Raises PeerLost if it is gone."""
        assert self._peers is not None
        while True:
            received = self._peers.receive()
            match received.kind:
                case Kind.STOP:
                    return
                case Kind.TARGET_STEP:
                    assert isinstance(received.message, TargetStep)
                    with naming_lost_peers(self._role, received.step):
                        self._execute(received.message)

    def heartbeat(self, number: int) -> None:
        if self._peers is not None:
            self._peers.heartbeat(number)

    def stop(self, number: int) -> None:
        if self._peers is not None:
            self._peers.stop(number)

    @torch.inference_mode()
    def features(self, rows: list[int]) -> Tensor | None:
        """Fused features [len(rows), H] of rows of the last step; None without an EAGLE drafter."""
        if self._fusion is None:
            return None
        assert self._taps_N3D is not None
        return self._fusion(self._taps_N3D[torch.tensor(rows, device=self._taps_N3D.device)])

    @torch.inference_mode()
    def _execute(self, step: TargetStep) -> list[int] | None:
        device = self._decoder.device
        if len(step.copy_source):
            self._kv.copy(step.copy_source.long().to(device), step.copy_target.long().to(device))
        plan = self._decoder.plan(step.attention, self._page_size)
        hidden = self._decoder.forward(step.token_N.to(device), step.position_N.to(device), plan, self._kv)
        self._taps_N3D = hidden.taps_N3D
        if len(step.sample_row_R) == 0:
            return []
        if len(step.sample_row_R) == len(step.token_N):
            sampled = hidden.final_ND
        else:
            sampled = hidden.final_ND[step.sample_row_R.to(device)]
        return self._draw(self._decoder.logits(sampled), step)

    def _draw(self, shard_RW: Tensor, step: TargetStep) -> list[int] | None:
        """The drawn tokens on rank 0, None elsewhere. Shards exchange 16 bytes per row unless a row needs top-k/p."""
        tp = self._decoder.tp
        params = step.sampling.to(shard_RW.device)
        index_R = step.draw_index_R.to(shard_RW.device)
        if tp.size == 1 or needs_whole_rows(params):
            whole_RV = gather_vocab(shard_RW, tp, self._decoder.spec.vocab_size)
            return draw(whole_RV, params, index_R).tolist() if tp.rank == 0 else None
        row_max_R = None
        if bool((params.min_p_B > 0).any()):
            row_max_R = shard_RW.amax(-1)
            dist.all_reduce(row_max_R, op=dist.ReduceOp.MAX, group=tp.group)
        score_R, id_R = shard_best(shard_RW, params, index_R, self._decoder.vocab_range[0], row_max_R)
        mine = torch.stack([score_R.double(), id_R.double()])  # ids are exact in float64
        every = torch.empty(tp.size, *mine.shape, dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(every.view(-1), mine.view(-1), group=tp.group)
        # The first shard among equals holds the lowest id, which is what argmax over the whole row picks.
        best = every[:, 0].argmax(0)
        return every[:, 1].gather(0, best[None])[0].long().tolist() if tp.rank == 0 else None

