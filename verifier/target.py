"""The target model on one verifier rank: runs a TargetStep, draws the target's tokens, keeps the EAGLE-3 taps.

Every rank runs the same step. Rank 0 sends it to its peers first, and it alone receives the drawn tokens.
Legend: N packed rows, R sampled rows, S scored prompt rows, T ranks, V vocabulary, W shard width, H draft hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verifier.hidden_states import HiddenStatePool
from workers.comm.channel import Channel, naming_lost_peers
from workers.comm.ipc import TokenLogprobs
from workers.comm.wire import Kind
from workers.cuda_graphs import Graphs
from workers.kv_cache import KVPool
from workers.kv_sizing import DRAWN_ROWS, SCORED_ROWS
from workers.models.base import BaseDecoder
from workers.models.layers import gather_vocab, shard_vocab
from workers.pulse import PULSE
from workers.sampling.grammar import Grammars
from workers.sampling.grammar_masks import grammar_masks
from workers.sampling.gumbel_cache import GumbelCache
from workers.sampling.logits_edits import Columns, ConstrainedRow
from workers.sampling.logits_processors import constrain
from workers.sampling.logits_state import unpack_logits_states
from workers.sampling.sampler import params_after_processing, process_logits_static
from workers.transfer import to_device, to_host
from workers.types import Hidden, SamplingBatch, SamplingNeeds, ScoredRows, TargetStep

Fuse = Callable[[Tensor], Tensor]
"""Maps the states of rows [N, X] to their features [N, H], in the model's dtype."""


class Candidate(NamedTuple):
    """The verifier's part of a head being scored, and the steps in which it still sends features for it."""

    fuse: Fuse
    steps_left: int


def _nothing() -> None:
    pass


class Target:
    """One rank's shard of the target with its KV pool.

    fuse: on rank 0 with a feature drafter, maps states to features. A state is the final hidden state, or the taps for
    EAGLE-3. The fc of EAGLE-3 is applied here, so the drafter is sent features of width H instead of 3 D.
    state_pool: with `fuse`, the memory for states that are not fed yet; the engine manages it.
    graphs: the decoder's CUDA graphs over this KV pool (`workers.cuda_graphs.decoder_graphs`); None = eager kernels.
    grammars: those of the requests; None = no request may have one.
    """

    def __init__(
        self,
        decoder: BaseDecoder,
        kv: KVPool,
        page_size: int,
        peers: Channel | None,
        fuse: Fuse | None,
        state_pool: HiddenStatePool | None = None,
        graphs: Graphs | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._page_size = page_size
        self._peers = peers
        self.fuse = fuse
        self.candidate: Candidate | None = None
        self.state_pool = state_pool
        self.graphs = graphs
        self.grammars = grammars
        self._role = f"verifier {decoder.tp.rank}"
        vocab_size = decoder.spec.vocab_size
        start, _, width = shard_vocab(vocab_size, decoder.tp)
        self._noise = GumbelCache(0, vocab_size)  # for whole rows
        self._shard_noise = self._noise if decoder.tp.size == 1 else GumbelCache(start, start + width)
        self._hidden: Hidden | None = None
        self._step: TargetStep | None = None  # the last one, if something reads its logits afterwards
        self._raw_RV: Tensor | None = None
        self._scores_S: list[TokenLogprobs] = []

    @property
    def has_states(self) -> bool:
        """True if the model has recurrent states beside keys and values."""
        return self._kv.states is not None

    def run(self, step: TargetStep, number: int, while_waiting: Callable[[], None] = _nothing) -> list[int]:
        """Rank 0: run one step on all ranks. Return the token drawn at each sampled row, or [] if no row draws one.

        while_waiting: called while the GPU computes what a graph has launched; before a step without graphs.
        """
        if self.graphs is None:
            while_waiting()
        if self._peers is not None:
            self._peers.send(step, number)
        with naming_lost_peers(self._role, number):
            drawn = self._execute(step, while_waiting)
        assert drawn is not None
        return drawn

    def follow(self, until: Kind) -> None:
        """Other ranks: execute the steps that rank 0 sends until it sends `until`. Raise PeerLost if rank 0 is gone."""
        assert self._peers is not None
        while (received := self._peers.receive()).kind != until:
            if received.kind == Kind.TARGET_STEP:
                assert isinstance(received.message, TargetStep)
                with naming_lost_peers(self._role, received.step):
                    self._execute(received.message)

    def heartbeat(self, number: int) -> None:
        """Rank 0: show the other ranks that the engine is alive."""
        if self._peers is not None:
            self._peers.heartbeat(number)

    def stop(self, number: int) -> None:
        """Rank 0: make the other ranks leave `follow`."""
        if self._peers is not None:
            self._peers.stop(number)

    def states(self) -> Tensor | None:
        """Return the states [N, X] of all rows of the last step; None if the drafter reads no features.

        Later steps do not overwrite them.
        """
        if self.fuse is None:
            return None
        assert self._hidden is not None
        final_ND, taps_N3D = self._hidden
        state_NX = final_ND if taps_N3D is None else taps_N3D
        return state_NX if self.graphs is None else state_NX.clone()  # a replay overwrites the graph's own

    @torch.inference_mode()
    def features(self, state_NX: Tensor) -> Tensor:
        """Return the features [N, H] of these states.

        States are fused when they are fed, because most states of a request without drafts are never fed.
        """
        assert self.fuse is not None
        return self.fuse(state_NX)

    @torch.inference_mode()
    def candidate_features(self, state_NX: Tensor) -> Tensor | None:
        """Return the features float32 [N, H] for the head being scored; None if there is none. Counts a step."""
        if self.candidate is None:
            return None
        fuse, steps_left = self.candidate
        self.candidate = Candidate(fuse, steps_left - 1) if steps_left > 1 else None
        return fuse(state_NX).float()

    @torch.inference_mode()
    def processed(self, rows_R: Tensor) -> Tensor:
        """Rank 0: return the processed logits at some sampled rows of the last step, which had sampled drafts.

        They are log-probabilities up to a constant, float32 [len(rows), V].
        """
        assert self._raw_RV is not None and self._step is not None
        own, device = self._step.drawing(rows_R), self._raw_RV.device
        raw_NV = self._raw_RV[to_device(rows_R, device)].float()
        logits_NV = self._constrained(raw_NV, own, Columns(0, raw_NV.shape[1]))
        return self._processed(logits_NV, own.sampling.to(device), own.sampling.needs)

    @torch.inference_mode()
    def logprobs(
        self, rows: list[int], tokens: list[int], num_top: int, chosen: list[int] | None = None
    ) -> list[TokenLogprobs]:
        """Rank 0: return the tokens' log-probabilities in the raw distribution at sampled rows of the last step.

        With each come those of the `num_top` most likely tokens, or of the `chosen` ones instead.
        """
        assert self._raw_RV is not None
        logits_NV = self._raw_RV[to_device(rows, self._raw_RV.device)].float()
        if chosen is not None:
            return chosen_logprobs(logits_NV, tokens, chosen)
        return token_logprobs(logits_NV, tokens, [num_top] * len(tokens))

    def scores(self) -> list[TokenLogprobs]:
        """Rank 0: return the log-probabilities of the last step's scored prompt rows, in the raw distribution."""
        return self._scores_S

    @torch.inference_mode()
    def _execute(self, step: TargetStep, while_waiting: Callable[[], None] = _nothing) -> list[int] | None:
        device = self._decoder.device
        self._step = self._raw_RV = None  # free the last step's large tensors first
        if len(step.copy_source):
            self._decoder.kernels.copy_slots(
                self._kv.data, to_device(step.copy_source.long(), device), to_device(step.copy_target.long(), device)
            )
        if step.folds is not None:
            if self.graphs is None:
                self._decoder.fold(step.folds, self._kv)
            else:
                self.graphs.fold(step.folds)
        if self.graphs is None:
            plan = self._decoder.plan(step.attention, self._page_size)
            hidden = self._decoder.forward(
                to_device(step.token_N, device), to_device(step.position_N, device), plan, self._kv
            )
        else:
            final_ND, *taps = self.graphs(step.attention, step.token_N, step.position_N)
            while_waiting()
            hidden = Hidden(final_ND, taps[0] if taps else None)
        self._hidden = hidden
        self._scores_S = [] if step.scored is None else self._score(hidden.final_ND, step.scored)
        if len(step.sample_row_R) == 0:
            return []
        if len(step.sample_row_R) == len(step.token_N):
            sampled = hidden.final_ND
        else:
            sampled = hidden.final_ND[to_device(step.sample_row_R, device)]
        return self._draw(sampled, step)

    def _score(self, final_ND: Tensor, scored: ScoredRows) -> list[TokenLogprobs]:
        """Return the log-probabilities of the scored rows' next tokens on rank 0, [] on other ranks.

        The logits of a few rows exist at a time, since those of a long prompt may take more memory than its KV.
        """
        tp, vocab_size, found = self._decoder.tp, self._decoder.spec.vocab_size, []
        tokens, num_top = scored.token_S.tolist(), scored.num_top_S.tolist()
        for begin in range(0, len(tokens), SCORED_ROWS):
            own = slice(begin, begin + SCORED_ROWS)
            rows = to_device(scored.row_S[own], final_ND.device)
            logits_NV = gather_vocab(self._decoder.logits(final_ND[rows]), tp, vocab_size)
            if tp.rank == 0:
                found += token_logprobs(logits_NV, tokens[own], num_top[own])
        return found

    def _draw(self, final_RD: Tensor, step: TargetStep) -> list[int] | None:
        """Return the drawn tokens on rank 0, None on other ranks.

        The float32 logits of DRAWN_ROWS rows exist at a time. Where something reads logits afterwards, rank 0 keeps
        those of all rows in the type that its head computes in.
        """
        num_rows, drawn = len(final_RD), []
        for begin in range(0, num_rows, DRAWN_ROWS):
            own = slice(begin, begin + DRAWN_ROWS)
            raw_RW = self._decoder.logits(final_RD[own])
            if step.has_logprobs or step.has_sampled:
                self._keep(raw_RW, step, own)
            part = step if num_rows <= DRAWN_ROWS else step.drawing(torch.arange(num_rows)[own])
            if step.has_draws and (id_R := self._draw_rows(raw_RW, part)) is not None:
                drawn.append(id_R)
            del raw_RW  # before there are more
        if self._decoder.tp.rank > 0:
            return None
        if not drawn:
            if final_RD.is_cuda:
                with PULSE.on_device():
                    torch.cuda.current_stream().synchronize()  # so that the forward's time is measured here
            return []
        with PULSE.on_device():  # the forward pass, too
            ids: list[int] = (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).tolist()
        return ids

    def _keep(self, raw_RW: Tensor, step: TargetStep, own: slice) -> None:
        """Keep the logits of some of a step's sampled rows on rank 0."""
        tp, vocab_size = self._decoder.tp, self._decoder.spec.vocab_size
        raw_RV = gather_vocab(raw_RW.to(self._decoder.logits_dtype), tp, vocab_size)
        if tp.rank > 0:
            return
        if self._raw_RV is None:
            self._step, self._raw_RV = step, raw_RV.new_empty(len(step.sample_row_R), vocab_size)
        self._raw_RV[own] = raw_RV

    def _draw_rows(self, raw_RW: Tensor, step: TargetStep) -> Tensor | None:
        """Return the tokens [R] drawn at a step's rows on rank 0, None on other ranks. Overwrites the logits.

        Shards exchange 16 bytes per row. Top-k and top-p need whole rows instead.
        """
        tp, vocab_size = self._decoder.tp, self._decoder.spec.vocab_size
        params = step.sampling.to(raw_RW.device)
        index_R = to_device(step.draw_index_R, raw_RW.device)
        start, end = self._decoder.vocab_range
        logits_RW = self._constrained(raw_RW, step, Columns(start, end - start))
        # Read from the step on the host: reading `params` would wait for the device's forward pass.
        needs = step.sampling.needs
        if needs.top:
            whole_RV = gather_vocab(logits_RW, tp, vocab_size)
            if tp.rank > 0:
                return None
            draw = self._decoder.kernels.coupled_argmax
            processed_RV = self._processed(whole_RV, params, needs)
            return draw(processed_RV, params_after_processing(params), index_R, 0, None, self._noise)[1]
        row_max_R = None
        if needs.min_p:
            row_max_R = logits_RW.amax(-1)
            if tp.size > 1:
                dist.all_reduce(row_max_R, op=dist.ReduceOp.MAX, group=tp.group)
        score_R, id_R = self._decoder.kernels.coupled_argmax(
            logits_RW, params, index_R, start, row_max_R, self._shard_noise
        )
        if tp.size == 1:
            return id_R
        mine = torch.stack([score_R.double(), id_R.double()])  # ids are exact in float64
        shards = [torch.empty_like(mine) for _ in range(tp.size)]
        dist.all_gather(shards, mine, group=tp.group)
        score_TR, id_TR = torch.stack(shards, dim=1)
        # Among equal scores the first shard holds the lowest id, as argmax over the whole row would pick.
        best_1R = score_TR.argmax(0, keepdim=True)
        return id_TR.gather(0, best_1R)[0].long() if tp.rank == 0 else None

    def _constrained(self, raw_RW: Tensor, step: TargetStep, columns: Columns) -> Tensor:
        """Apply the constraints of a step's rows to their logits, in place where they are contiguous."""
        rows = _constrained_rows(step)
        masks = grammar_masks(rows, columns, self.grammars)
        return constrain(raw_RW, rows, columns, masks, in_place=raw_RW.is_contiguous())

    def _processed(self, logits_RV: Tensor, params: SamplingBatch, needs: SamplingNeeds) -> Tensor:
        """Overwrite whole rows of logits with `process_logits` of them. params: on their device; needs: theirs."""
        threshold = self._decoder.kernels.truncation_threshold
        return process_logits_static(
            logits_RV, params, has_min_p=needs.min_p, has_top=needs.top, threshold=threshold, in_place=True
        )


def chosen_logprobs(logits_NV: Tensor, tokens: list[int], chosen: list[int]) -> list[TokenLogprobs]:
    """Return the log-probability of one token at each row, with those of the same chosen tokens at every row."""
    logp_NV = logits_NV.log_softmax(-1)
    own_N, rank_N = _own(logp_NV, tokens)
    columns = (column.tolist() for column in to_host(own_N, rank_N, logp_NV[:, to_device(chosen, logp_NV.device)]))
    return [
        TokenLogprobs(logprob=own, rank=rank, top=list(({token: own} | dict(zip(chosen, row, strict=True))).items()))
        for token, own, rank, row in zip(tokens, *columns, strict=True)
    ]


def _own(logp_NV: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one token at each row, and its rank there."""
    own_N1 = logp_NV.gather(1, to_device(tokens, logp_NV.device)[:, None])
    return own_N1[:, 0], (logp_NV > own_N1).sum(-1) + 1


def token_logprobs(logits_NV: Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Return the log-probability of one token at each row, with the row's `num_top` most likely tokens."""
    logp_NV = logits_NV.log_softmax(-1)
    own_N, rank_N = _own(logp_NV, tokens)
    top = logp_NV.topk(max(num_top), dim=-1)
    columns = (column.tolist() for column in to_host(own_N, rank_N, top.indices, top.values))
    return [
        TokenLogprobs(logprob=own, rank=rank, top=list(zip(ids[:num], values[:num], strict=True)))
        for own, rank, ids, values, num in zip(*columns, num_top, strict=True)
    ]


def _constrained_rows(step: TargetStep) -> list[ConstrainedRow]:
    """Return the sampled rows whose request has constraints, each with its path of tokens below the root."""
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
    """Yield the set bits of an int64, lowest first."""
    mask &= (1 << 64) - 1
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
