"""One request's state in the engine; owned and mutated by `verifier.engine` alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from workers.ipc import RequestStats, Submit
from workers.types import TreeLimits, Verdict


@dataclass(slots=True, eq=False)
class Request:
    """Invariant once decoding: num_computed == len(tokens) - 1, the last token being the root of the next tree."""

    submit: Submit
    limits: TreeLimits | None  # None: never drafted for
    first_draft_slot: int  # 1 for an EAGLE drafter, whose slot 0 stays empty; 0 for a draft model
    tokens: list[int] = field(init=False)  # prompt and output
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # positions whose KV the target holds
    num_fed: int = field(init=False)  # drafter slots filled
    features: Tensor | None = None  # [fed next, H] fused features of the newest computed positions
    accepted: int = -1  # path length of the last verdict
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.submit.prompt)
        self.num_fed = self.first_draft_slot

    @property
    def id(self) -> int:
        return self.submit.id

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        return self.num_output > 0

    @property
    def num_feedable(self) -> int:
        """Drafter slots that can be filled now: slot j needs token j and, for EAGLE, the feature of position j - 1."""
        return min(self.num_computed + 1, len(self.tokens))

    def count(self, verdict: Verdict) -> None:
        self.accepted = len(verdict.path)
        self.num_drafts += verdict.num_verified > 0
        self.num_draft_tokens += verdict.num_drafted
        self.num_verified_tokens += verdict.num_verified
        self.num_accepted_tokens += len(verdict.path)

    def stats(self) -> RequestStats:
        return RequestStats(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_verified_tokens=self.num_verified_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )
