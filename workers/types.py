"""The types that travel between processes and between the stages of a step. Read this file first.

Legend: B requests, N packed rows, M packed drafter rows, V vocabulary, D hidden width, K children, S sparse entries,
T traced nodes.
A packed batch of B ragged requests keeps request i's rows at ``offsets[i]:offsets[i+1]``. In memory, integers are
int32 or int64 and reals are float32; `workers.comm.wire` narrows them for transport.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.config import TreeRules
from workers.settings import SamplingSettings
from workers.transfer import all_to_device, to_host


def column(memory: str = "int32", *, wire: str | None = None, ndim: int = 1) -> dict[str, Any]:
    """Describe an array of a message that is not int32 [N]; it may be narrower in transport."""
    return {"memory": memory, "wire": wire or memory, "ndim": ndim}


class NodeKind(IntEnum):
    """How a node's token was chosen, which decides the acceptance rule that applies to it.

    Compare arrays with `.value`: comparing them with the member itself takes numpy ten times as long.
    """

    ROOT = 0
    DETERMINISTIC = 1
    COUPLED = 2
    SAMPLED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """Draft trees of B requests, packed breadth-first. Row 0 of each tree is its root: the last committed token.

    Example: one request whose root (token 7) has children 9 and 4, and 9 has child 5:
    offsets [0, 4], token [7, 9, 4, 5], parent [-1, 0, 0, 1], depth [0, 1, 1, 2],
    ancestors [0b0001, 0b0011, 0b0101, 0b1011] (a node is its own ancestor).
    """

    offsets: Tensor  # [B+1] int32
    token_N: Tensor  # [N] int32
    parent_N: Tensor = field(metadata=column(wire="int16"))  # [N] int32, row within the request, -1 at the root
    depth_N: Tensor = field(metadata=column(wire="int8"))  # [N] int32
    ancestors_N: Tensor = field(metadata=column("int64"))  # [N] int64 bitmask over the request's rows
    kind_N: Tensor = field(metadata=column("uint8"))  # [N] uint8, NodeKind
    weight_N: Tensor = field(
        metadata=column("float32", wire="float16")
    )  # [N] float32, estimated probability that the node survives verification


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProbs:
    """Sparse draft distributions q(.|node) of the nodes whose children were sampled.

    q(id | node n) is exactly weight / (sum of the node's weights), on both sides of the wire.
    Example: two rows, only the first with a distribution: offsets [0, 2, 2], id [5, 9], weight [3, 1].
    """

    offsets: Tensor  # [N+1] int32
    id_S: Tensor  # [S] int32
    weight_S: Tensor = field(metadata=column(wire="uint16"))  # [S] int32, 1 .. 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTrace:
    """All nodes that were drafted in one step, for the requests that ask to see them.

    The rows of a request are those of its tree, in their order, then at most `MAX_TREE_NODES` pruned ones; a request
    that does not ask has none. A pruned row with token -1 stands for children that were not drafted.

    Example: one request whose root (token 7) has child 9; 9 failed the min threshold, and its child would be 5:
    offsets [0, 3], token [7, 9, 5], parent [-1, 0, 1], depth [0, 1, 2], prob [1, 0.5, 0.1], weight [1, 0.5, 0.05],
    reason [0, 0, 1].
    """

    offsets: Tensor  # [G+1] int32
    token_T: Tensor  # int32
    parent_T: Tensor = field(metadata=column(wire="int16"))  # int32, row within the request, -1 at the root
    depth_T: Tensor = field(metadata=column(wire="int8"))  # int32
    prob_T: Tensor = field(metadata=column("float32"))  # float32, q(token | parent); NaN if it is not known
    weight_T: Tensor = field(metadata=column("float32", wire="float16"))  # as in TreeBatch; NaN if it is not known
    reason_T: Tensor = field(metadata=column("uint8"))  # uint8, PruneReason


class Verdict(NamedTuple):
    """The result of verifying one request's tree."""

    path: tuple[int, ...]  # accepted rows below the root, in order
    tokens: tuple[int, ...]  # committed tokens: those of `path`, then the bonus token
    num_drafted: int  # draft nodes the drafter sent
    num_verified: int  # draft nodes that went through the target

    @property
    def bonus_token(self) -> int:
        """The token that the target adds behind the accepted path."""
        return self.tokens[-1]


class SamplingNeeds(NamedTuple):
    """The operations that at least one row of a SamplingBatch needs. Greedy rows need no truncation."""

    is_greedy: bool
    is_sampled: bool
    min_p: bool
    top: bool  # top-k or top-p, which need the logits of the whole vocabulary

    @property
    def truncates(self) -> bool:
        """True if min-p, top-k or top-p applies."""
        return self.min_p or self.top


@dataclass(frozen=True, kw_only=True)  # no slots, because of the cached property
class SamplingBatch:
    """SamplingSettings of B rows as tensors [B]: a column has the name of its setting, with _B."""

    temperature_B: Tensor = field(metadata=column("float32"))
    top_k_B: Tensor
    top_p_B: Tensor = field(metadata=column("float32"))
    min_p_B: Tensor = field(metadata=column("float32"))
    seed_B: Tensor = field(metadata=column("int64"))

    @staticmethod
    def stack(params: list[SamplingSettings], device: torch.device | str = "cpu") -> SamplingBatch:
        """Build a batch of one row per entry."""

        def values(spec: Field[Any]) -> Tensor:
            dtype = spec.metadata.get("memory", "int32")
            given = [getattr(each, spec.name.removesuffix("_B")) for each in params]
            return torch.from_numpy(np.array(list(map(as_signed64, given)) if dtype == "int64" else given, dtype))

        return SamplingBatch(**{spec.name: values(spec).to(device) for spec in fields(SamplingBatch)})

    @cached_property
    def needs(self) -> SamplingNeeds:
        """Reads the values: call it on host tensors, because on a device it synchronizes."""
        temperature_B, top_k_B, top_p_B, min_p_B = to_host(self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B)
        hot_B = temperature_B > 0
        if not hot_B.any():
            return SamplingNeeds(is_greedy=True, is_sampled=False, min_p=False, top=False)
        top_B = (top_k_B > 0) | (top_p_B < 1)
        return SamplingNeeds(
            is_greedy=not hot_B.all(),
            is_sampled=True,
            min_p=bool((hot_B & (min_p_B > 0)).any()),
            top=bool((hot_B & top_B).any()),
        )

    def rows(self, index_N: Tensor) -> SamplingBatch:
        """Repeat the parameters per row: row n gets those of request index_N[n]."""
        if not (self.seed_B.is_cpu and index_N.is_cpu):
            return self._each(lambda column_B: column_B[index_N])
        index = index_N.numpy()  # every step waits for this, and numpy takes a third of torch's time
        return self._each(lambda column_B: torch.from_numpy(column_B.numpy()[index]))

    def to(self, device: torch.device | str) -> SamplingBatch:
        """Copy from the host to a device without synchronizing."""
        if self.seed_B.device == torch.device(device):
            return self
        names = [column.name for column in fields(self)]
        columns = all_to_device([getattr(self, name).numpy() for name in names], device)
        return SamplingBatch(**dict(zip(names, columns, strict=True)))

    def _each(self, change: Callable[[Tensor], Tensor]) -> SamplingBatch:
        return SamplingBatch(**{column.name: change(getattr(self, column.name)) for column in fields(self)})


def as_signed64(value: int) -> int:
    """Return the int64 with the same 64 bits (torch has no uint64 arithmetic on CPU)."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _no_seats() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)  # no slots, because of the cached property
class AttentionMetadata:
    """The attention pattern of one packed forward pass over the paged KV cache.

    Its fields are arrays, because planning consists of many small integer operations on the critical path of every
    step: in numpy each takes a third of the time it takes in torch.

    Each request owns logical KV slots 0, 1, 2, ...; slot s lives at ``page_table[b, s // page_size] * page_size +
    s % page_size``. Row n of request b writes its own key and value to slot ``slot_N[n]`` and then attends to

    - slots ``[0, visible_N[n])``: the committed prefix (for a prompt row also the chunk up to itself, included), and
    - slot ``base_B[b] + r`` for every bit r set in ``ancestors_N[n]``: its path inside the tree, itself included.

    Example: a request with 10 committed tokens before its root and the tree of `TreeBatch`'s example:
    base 10, slot [10, 11, 12, 13], visible [10, 10, 10, 10], ancestors [0b0001, 0b0011, 0b0101, 0b1011].
    A prompt chunk of positions 4..6 of another request: base 0, slot [4, 5, 6], visible [5, 6, 7], ancestors [0, 0, 0].

    Recurrent states (`workers.kv_cache.StatePool`) have seats. Request b begins with the state of seat read_seat_B[b],
    0 = the state before the first token. The state behind a prompt chunk is written to seat write_seat_B[b]. A tree has
    0 there, because its verdict decides which state follows. The state behind row keep_row_K[k] of a chunk is also
    written to seat keep_seat_K[k], where the prefix cache keeps it.
    """

    query_offsets: np.ndarray  # [B+1] int32, rows of request b
    page_table_BP: np.ndarray = field(metadata=column(ndim=2))  # [B, P] int32, padded with page 0
    base_B: np.ndarray  # [B] int32
    slot_N: np.ndarray  # [N] int32, logical slot the row writes
    visible_N: np.ndarray  # [N] int32
    ancestors_N: np.ndarray = field(metadata=column("int64"))  # [N] int64
    read_seat_B: np.ndarray = field(default_factory=_no_seats)  # [B] int32; empty = the model has no recurrent states
    write_seat_B: np.ndarray = field(default_factory=_no_seats)  # [B] int32
    keep_row_K: np.ndarray = field(default_factory=_no_seats)  # [K] int32
    keep_seat_K: np.ndarray = field(default_factory=_no_seats)  # [K] int32

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.base_B)

    @property
    def owner_N(self) -> np.ndarray:
        """The request of each row."""
        if self.num_requests == 1:
            return np.zeros(len(self.slot_N), dtype=np.int64)
        return np.arange(self.num_requests).repeat(self.query_offsets[1:] - self.query_offsets[:-1])

    @cached_property
    def has_ancestors(self) -> bool:
        """True if some row is one of a tree."""
        return bool(self.ancestors_N.any())

    def physical(self, owner: np.ndarray, slot: np.ndarray, page_size: int) -> np.ndarray:
        """Map logical slots of requests `owner` to physical slots, int64 (broadcast together)."""
        page, place = np.divmod(slot, page_size)
        return self.page_table_BP[owner, page].astype(np.int64) * page_size + place


class Hidden(NamedTuple):
    """The output of a forward pass."""

    final_ND: Tensor  # [N, D] after the final norm: the input of the LM head
    taps_N3D: Tensor | None  # [N, 3 D] residual stream at the EAGLE-3 tap layers, concatenated low, mid, high


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Step costs and confidence calibration, from which `auto` chooses node budgets.

    The engine measures them and sends them along, so that all drafter ranks decide alike. The time to verify n draft
    nodes in addition to the rest of the step is piecewise linear. A child's calibrated confidence is
    sigmoid(logit(c) + log_odds).
    """

    nodes_T: Tensor  # [T] int32, ascending from 0
    verify_ms_T: Tensor = field(metadata=column("float32"))  # [T] float32
    draft_ms_3: Tensor = field(
        metadata=column("float32")
    )  # [3] float32: input rows and the roots' level; each further level; each node run there
    base_tokens_1: Tensor = field(metadata=column("float32"))  # [1] float32: tokens the step yields without drafts
    log_odds_D: Tensor = field(metadata=column("float32"))  # [D] float32, for depth 1 .. D; deeper nodes use the last


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnRows:
    """Which rows of a DraftRequest a drafter that learns may keep."""

    id_B: Tensor  # [B] int32, which tells the requests apart; 0 = nothing of this one
    num_prompt_B: Tensor  # [B] int32: tokens from this position on are the target's own
    tenant_B: Tensor  # [B] int32, see `Submit.tenant`


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The drafter's input of one step: B requests with M new rows. The KV cache is its only per-request state.


    Row m of request b is (token t_j, feature f_{j-1}) for slot j = start_B[b] + m. The rows are the tokens committed
    since the drafter last received the request, in order. Draft models get no features. A request with num_nodes 0
    only updates the KV cache (its prompt is not complete, or too little room is left to draft). Every other request
    gets a tree rooted at its last row, in this order. A message without any is not answered.
    """

    offsets: Tensor  # [B+1] int32, rows of request b
    start_B: Tensor  # [B] int32, slot of the request's first row
    token_M: Tensor  # [M] int32
    page_table_BP: Tensor = field(metadata=column(ndim=2))  # [B, P] int32
    rule_B: Tensor  # [B] int32, Rule
    auto_B: Tensor  # [B] int32, 1 = the node budget follows from `costs`
    num_nodes_B: Tensor  # [B] int32, most nodes of this step's tree, root excluded
    max_depth_B: Tensor  # [B] int32
    rules: TreeRules[Tensor]  # each [B] float32
    constraints_U: Tensor = field(
        metadata=column("uint8")
    )  # uint8, see `workers.sampling.logits_state`; empty = no request is constrained
    sampling: SamplingBatch  # of the B requests
    costs: DraftCosts | None  # None = no request uses `auto`
    features_MH: Tensor | None = field(metadata={"is_bulk": True})  # [M, H] in the drafter's dtype
    traced_B: Tensor | None = None  # [B] int32, 1 = the reply has a trace of the request's tree; None = nobody asks
    learn: LearnRows | None = None  # None = the drafter neither learns nor scores a head
    candidate_MH: Tensor | None = field(
        default=None, metadata=column("float32", ndim=2)
    )  # [M, H] float32, the features for a head being scored; None = there is none

    @property
    def is_answered(self) -> bool:
        """Return whether the drafter replies, because some request gets a tree."""
        return bool(self.num_nodes_B.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReply:
    """The drafter's reply to a DraftRequest: one tree for each of the G requests with num_nodes > 0."""

    trees: TreeBatch
    probs: DraftProbs | None  # None = no node was sampled
    pruned_GD: Tensor = field(metadata=column(ndim=2))  # [G, D] int32: nodes that pruning removed at depth 1 .. D
    num_levels: int  # tree levels that were run, the root included
    num_run: int  # rows run through the draft model, padding included, roots excluded
    seconds: float  # time of this step on the drafter's clock
    trace: TreeTrace | None = None  # of the G requests; None = nobody asked
    learnt_U: Tensor | None = field(default=None, metadata=column("uint8"))  # folder of a better head, see `as_bytes`


class HeadProgress(IntEnum):
    """How far another head is. The drafter's ranks agree on the least of theirs."""

    FAILED = 0
    LOADING = 1
    TAKEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHead:
    """Asks the drafter to load another head beside its own, and to take or score it once all drafter ranks have it.

    It is sent again and again until the reply says that this is done, or why it is not.
    """

    path_U: Tensor = field(metadata=column("uint8"))  # the head's folder, see `as_bytes`
    action: int = 0  # HeadAction
    num_steps: int = 0  # messages with features for it after which scoring ends


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadState:
    """The drafter's reply to a NewHead, sent at once."""

    progress: int  # HeadProgress
    reason_U: Tensor = field(metadata=column("uint8"))  # why it failed; empty = it did not
    scores_U: Tensor | None = field(default=None, metadata=column("uint8"))  # JSON, see `Canary.told`; None = no head


def as_bytes(text: str) -> Tensor:
    """Return a text as uint8 [U], in UTF-8."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def as_text(bytes_U: Tensor) -> str:
    """Return what `as_bytes` was given."""
    return bytes(bytes_U.tolist()).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Prompt rows of a step whose requests ask for the log-probability of the prompt's next token."""

    row_S: Tensor  # [S] int32
    token_S: Tensor  # [S] int32, the prompt's token after the row's
    num_top_S: Tensor  # [S] int32, how many of the most likely tokens to report


@dataclass(frozen=True, slots=True, kw_only=True)
class Folds:
    """The accepted rows of the last step's trees, which the recurrent states take in before the next forward pass."""

    offsets: Tensor  # [F+1] int32
    row_A: Tensor  # [A] int32, rows of the last step: each root and its accepted path
    seat_F: Tensor  # [F] int32
    keep_row_K: Tensor  # [K] int32, indices into row_A: the states behind these rows ...
    keep_seat_K: Tensor  # [K] int32 ... are also written to these seats


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStep:
    """One forward pass of the target over N packed rows, R of which are sampled. Rank 0 sends it to its TP peers."""

    copy_source: Tensor  # [C] int32 physical KV slots: the last step's accepted paths ...
    copy_target: Tensor  # [C] int32 ... move here before the forward pass
    token_N: Tensor  # [N] int32
    position_N: Tensor  # [N] int32
    sample_row_R: Tensor  # [R] int32, rows whose next token is drawn
    request_R: Tensor  # [R] int32, the request that the row belongs to
    draw_index_R: Tensor  # [R] int32, position of the token drawn there
    constraints_U: Tensor = field(
        metadata=column("uint8")
    )  # uint8, see `workers.sampling.logits_state`; empty = no request is constrained
    attention: AttentionMetadata  # of the N rows
    sampling: SamplingBatch  # of the R sampled rows
    has_logprobs: bool  # some request wants logprobs: rank 0 keeps the logits
    has_sampled: bool  # some request's drafts are sampled: rank 0 keeps the full distributions
    has_draws: bool  # some request follows the target's own draws: every sampled row gets one
    scored: ScoredRows | None = None  # None = no request asks for log-probabilities of its prompt
    folds: Folds | None = None  # None = no tree of the last step waits, or the model has no recurrent states

    def drawing(self, rows: Tensor) -> TargetStep:
        """Return the step with these of its sampled rows alone."""
        names = ("sample_row_R", "request_R", "draw_index_R")
        return replace(self, sampling=self.sampling.rows(rows), **{name: getattr(self, name)[rows] for name in names})
