"""What a step did with the trees of the requests that ask to see them: a pure function of drafts and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

from verifier.draft_batch import DraftBatch
from verifier.request import Request
from verifier.scheduler import Step
from workers.comm.ipc import TreeRecord
from workers.types import TreeTrace, Verdict


class StepTimes(NamedTuple):
    """The milliseconds of one step, for all of its requests together."""

    draft: float | None  # None = nothing was sent to the drafter
    verify: float


class _Nodes(NamedTuple):
    """One request's nodes, columns of a `TreeRecord`."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    probs: list[float | None]
    weights: list[float | None]
    reasons: list[int]


def tree_records(
    step: Step, drafts: DraftBatch, verdicts: list[Verdict], times: StepTimes
) -> Mapping[Request, TreeRecord]:
    """Return the records of the step's decoding requests and completed prompts that ask for them."""
    requests = step.decode + [request for request, _ in step.finishing]
    if not any(request.submit.has_trees for request in requests):
        return {}
    num_drafted = list(accumulate(drafts.drafted, initial=0))
    records = {}
    for i, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
        if not request.submit.has_trees:
            continue
        if drafts.trace is not None and i < len(step.decode) and drafts.drafted[i]:
            nodes = _traced(drafts.trace, num_drafted[i])
        elif i < len(step.decode):
            nodes = _untraced(drafts, i)
        else:  # the root of a prompt
            nodes = _Nodes(request.tokens[-1:], [-1], [0], [None], [1.0], [0])
        records[request] = TreeRecord(
            **nodes._asdict(), path=list(verdict.path), draft_ms=times.draft, verify_ms=times.verify
        )
    return records


def _traced(trace: TreeTrace, g: int) -> _Nodes:
    """Return the nodes of the reply's tree g."""
    own = slice(*trace.offsets[g : g + 2].tolist())
    return _Nodes(
        trace.token_T[own].tolist(),
        trace.parent_T[own].tolist(),
        trace.depth_T[own].tolist(),
        [None, *map(_known, trace.prob_T[own].tolist()[1:])],
        [_known(weight) for weight in trace.weight_T[own].tolist()],
        trace.reason_T[own].tolist(),
    )


def _untraced(drafts: DraftBatch, i: int) -> _Nodes:
    """Return the nodes of request i's lookup draft or bare root, of which nothing is estimated."""
    begin, end = list(pairwise(drafts.trees.offsets.tolist()))[i]
    size = end - begin
    return _Nodes(
        drafts.trees.token_N[begin:end].tolist(),
        drafts.trees.parent_N[begin:end].tolist(),
        drafts.trees.depth_N[begin:end].tolist(),
        [None] * size,
        [1.0, *[None] * (size - 1)],
        [0] * size,
    )


def _known(value: float) -> float | None:
    return value if value == value else None
