"""The target model on one verifier rank: runs a TargetStep, draws the target's own tokens, keeps the EAGLE taps.

Every rank runs the same step. Rank 0 sends it to its peers first and is the only one that learns the drawn tokens.
Legend: N packed rows, R sampled rows, T ranks, V vocabulary, W shard width, H draft hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from verifier.hidden_states import HiddenStatePool
from workers.comm.channel import Channel, naming_lost_peers
from workers.comm.ipc import TokenLogprobs
from workers.comm.wire import Kind
from workers.cuda_graphs import Graphs
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.models.layers import gather_vocab, shard_vocab
from workers.sampling.gumbel_cache import GumbelCache
from workers.sampling.logits_edits import Columns, ConstrainedRow
from workers.sampling.logits_processors import constrain
from workers.sampling.logits_state import unpack_logits_states
from workers.sampling.sampler import params_after_processing, process_logits_static
from workers.transfer import to_device, to_host
from workers.types import Hidden, TargetStep

Fuse = Callable[[Tensor], Tensor]
"""States of rows [N, X] -> their features [N, H], in the model's dtype."""


class Target:
    """One rank's share of the target with its KV pool.

    fuse: on rank 0, what turns the states of rows into what a feature drafter is told of them. A state is the final
    hidden state, or for EAGLE-3 the taps, whose fc is applied here: the drafter is sent H, not 3 D, wide features.
    waiting: then, where states wait to be fed. graphs: of the decoder over this pool
    (`workers.cuda_graphs.decoder_graphs`); None = every kernel is launched by itself.
    """

    def __init__(
        self,
        decoder: BaseDecoder,
        kv: KVPool,
        page_size: int,
        peers: Channel | None,
        fuse: Fuse | None,
        waiting: HiddenStatePool | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._page_size = page_size
        self._peers = peers
        self._fuse = fuse
        self.waiting = waiting
        self.graphs = graphs
        self._role = f"verifier {decoder.tp.rank}"
        vocab_size = decoder.spec.vocab_size
        start, _, width = shard_vocab(vocab_size, decoder.tp)
        self._noise = GumbelCache(0, vocab_size)  # of whole rows
        self._shard_noise = self._noise if decoder.tp.size == 1 else GumbelCache(start, start + width)
        self._hidden: Hidden | None = None
        self._processed_RV: Tensor | None = None
        self._raw_RV: Tensor | None = None

    def run(self, step: TargetStep, number: int) -> list[int]:
        """Rank 0: one step on all ranks; returns the token drawn at each sampled row, or nothing if nobody asks."""
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

    def states(self) -> Tensor | None:
        """States [N, X] of all rows of the last step, which nobody writes over; None without a drafter that reads
        features."""
        if self._fuse is None:
            return None
        assert self._hidden is not None
        final_ND, taps_N3D = self._hidden
        state_NX = final_ND if taps_N3D is None else taps_N3D
        return state_NX if self.graphs is None else state_NX.clone()  # graphs write over theirs

    @torch.inference_mode()
    def features(self, waiting: list[int]) -> Tensor | None:
        """The features [N, H] of states that wait in these rows, which are free then. Fused only now, because most of a
        request that is never drafted for never are."""
        if self._fuse is None or not waiting:
            return None
        assert self.waiting is not None
        return self._fuse(self.waiting.take(waiting))

    def processed(self, rows_R: Tensor) -> Tensor:
        """Rank 0: the processed distribution at some of the last step's sampled rows, when drafts were sampled.

        Log-probabilities up to a constant, float32 [len(rows), V].
        """
        assert self._processed_RV is not None
        if len(rows_R) == len(self._processed_RV):
            return self._processed_RV  # rows come in order, none twice
        return self._processed_RV[to_device(rows_R, self._processed_RV.device)]

    @torch.inference_mode()
    def logprobs(self, rows: list[int], tokens: list[int], num_top: int) -> list[TokenLogprobs]:
        """Rank 0: tokens in the model's own distribution at sampled rows of the last step that asked for it."""
        assert self._raw_RV is not None
        logp_NV = self._raw_RV[to_device(rows, self._raw_RV.device)].log_softmax(-1)
        own_N1 = logp_NV.gather(1, to_device(tokens, logp_NV.device)[:, None])
        rank_N = (logp_NV > own_N1).sum(-1) + 1
        top = logp_NV.topk(num_top, dim=-1)
        columns = (column.tolist() for column in to_host(own_N1[:, 0], rank_N, top.indices, top.values))
        return [
            TokenLogprobs(logprob=own, rank=rank, top=list(zip(ids, values, strict=True)))
            for own, rank, ids, values in zip(*columns, strict=True)
        ]

    @torch.inference_mode()
    def _execute(self, step: TargetStep) -> list[int] | None:
        device = self._decoder.device
        self._processed_RV = self._raw_RV = None  # large, and of the last step
        if len(step.copy_source):
            self._decoder.kernels.copy_slots(
                self._kv.data, to_device(step.copy_source.long(), device), to_device(step.copy_target.long(), device)
            )
        if self.graphs is None:
            plan = self._decoder.plan(step.attention, self._page_size)
            hidden = self._decoder.forward(
                to_device(step.token_N, device), to_device(step.position_N, device), plan, self._kv
            )
        else:
            final_ND, *taps = self.graphs(step.attention, step.token_N, step.position_N)
            hidden = Hidden(final_ND, taps[0] if taps else None)
        self._hidden = hidden
        if len(step.sample_row_R) == 0:
            return []
        if len(step.sample_row_R) == len(step.token_N):
            sampled = hidden.final_ND
        else:
            sampled = hidden.final_ND[to_device(step.sample_row_R, device)]
        return self._draw(self._decoder.logits(sampled), step)

    def _draw(self, raw_RW: Tensor, step: TargetStep) -> list[int] | None:
        """The drawn tokens on rank 0, None elsewhere. Shards exchange 16 bytes per row unless whole rows are needed:
        for top-k and top-p, for sampled drafts, and for log-probabilities."""
        tp, vocab_size = self._decoder.tp, self._decoder.spec.vocab_size
        params = step.sampling.to(raw_RW.device)
        index_R = to_device(step.draw_index_R, raw_RW.device)
        start, end = self._decoder.vocab_range
        logits_RW = constrain(raw_RW, _constrained_rows(step), Columns(start, end - start))
        # Asked of the step itself, which lies on the host: a device would first finish its forward pass.
        needs = step.sampling.needs
        if step.has_logprobs:
            raw_RV = gather_vocab(raw_RW, tp, vocab_size)
            self._raw_RV = raw_RV if tp.rank == 0 else None
        if step.has_sampled or needs.top:
            whole_RV = gather_vocab(logits_RW, tp, vocab_size)
            if tp.rank > 0:
                return None
            threshold = self._decoder.kernels.truncation_threshold
            self._processed_RV = process_logits_static(
                whole_RV, params, has_min_p=needs.min_p, has_top=needs.top, threshold=threshold
            )
            if not step.has_draws:
                if whole_RV.is_cuda:
                    torch.cuda.current_stream().synchronize()  # who judges would wait, and the time is the forward's
                return []
            draw = self._decoder.kernels.coupled_argmax
            return draw(self._processed_RV, params_after_processing(params), index_R, 0, None, self._noise)[1].tolist()
        row_max_R = None
        if needs.min_p:
            row_max_R = logits_RW.amax(-1)
            if tp.size > 1:
                dist.all_reduce(row_max_R, op=dist.ReduceOp.MAX, group=tp.group)
        score_R, id_R = self._decoder.kernels.coupled_argmax(
            logits_RW, params, index_R, start, row_max_R, self._shard_noise
        )
        if tp.size == 1:
            return id_R.tolist()
        mine = torch.stack([score_R.double(), id_R.double()])  # ids are exact in float64
        shards = [torch.empty_like(mine) for _ in range(tp.size)]
        dist.all_gather(shards, mine, group=tp.group)
        score_TR, id_TR = torch.stack(shards, dim=1)
        # The first shard among equals holds the lowest id, which is what argmax over the whole row picks.
        best_1R = score_TR.argmax(0, keepdim=True)
        return id_TR.gather(0, best_1R)[0].long().tolist() if tp.rank == 0 else None


def _constrained_rows(step: TargetStep) -> list[ConstrainedRow]:
    """The sampled rows whose request has constraints, each with the tokens on its way from the root."""
    logits_states = unpack_logits_states(step.constraints_U)
    if not logits_states:
        return []
    rows = []
    begins, tokens = step.attention.query_offsets.tolist(), step.token_N.tolist()
    ancestors = step.attention.ancestors_N.tolist()
    for r, (request, row) in enumerate(zip(step.request_R.tolist(), step.sample_row_R.tolist(), strict=True)):
        if request in logits_states:
            path = [tokens[begins[request] + bit] for bit in _bits(ancestors[row]) if bit]
            rows.append(ConstrainedRow(r, logits_states[request], path))
    return rows


def _bits(mask: int) -> Iterator[int]:
    """Those set in an int64, ascending."""
    mask &= (1 << 64) - 1
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
