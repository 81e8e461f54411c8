"""One request's state in the engine; owned and mutated by `verifier.engine` alone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial

from workers.comm.ipc import RequestStats, Submit
from workers.sampling.logits_state import LogitsState, TokenCounter
from workers.types import Rule, TreeLimits


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """Lives through prefill -> decoding, again from the start after each preemption: what lived in pages is computed
    anew from the tokens, which stay.

    Invariant while decoding: num_computed == len(tokens) - 1, the last token being the root of the next tree.
    """

    submit: Submit
    rule: Rule
    limits: TreeLimits | None  # None: never drafted for
    first_draft_slot: int  # 1 for an EAGLE drafter, whose slot 0 stays empty; 0 for a draft model
    tokens: list[int] = field(init=False)  # prompt and output
    num_prompt: int = field(init=False)
    tree_rows: int = field(init=False)  # most rows of one of its trees, root included
    is_auto: bool = field(init=False)  # whether to draft for it is ours to say
    is_constrained: bool = field(init=False)
    pages: array[int] = field(default_factory=partial(array, "i"))  # thousands, told anew in every step
    num_published: int = 0  # leading pages that others may share ...
    num_published_drafted: int = 0  # ... and that the drafter holds too
    num_computed: int = 0  # positions whose KV the target holds
    num_fed: int = field(init=False)  # drafter slots filled
    states: list[int] = field(default_factory=list)  # where those of the newest computed positions wait
    num_cached: int | None = None  # prompt tokens that were found computed when it first joined; None: it has not
    is_repeated: bool = False  # begins like others, who left no drafted pages: those who come next shall find some
    stats: RequestStats = field(default_factory=RequestStats)
    keys: list[bytes] = field(default_factory=list)  # of its leading full pages, see `verifier.prefix_cache`
    _token_counter: TokenCounter = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.submit.prompt)
        self.num_prompt = len(self.tokens)
        self.tree_rows = 1 + (self.limits.num_speculative_tokens if self.limits else 0)
        self.is_auto = self.limits is not None and self.limits.auto
        self.num_fed = self.first_draft_slot
        self.is_constrained = not self.submit.sampling.constraints.is_empty
        self._token_counter = TokenCounter(self.submit.sampling.constraints, self.submit.prompt)

    def forget(self) -> None:
        """Lets go of everything that lives in its pages or was on its way there."""
        self.pages, self.num_published, self.num_published_drafted = array("i"), 0, 0
        self.num_computed, self.num_fed, self.states = 0, self.first_draft_slot, []

    def append(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self._token_counter.add(tokens)

    def logits_state(self, eos_token_ids: tuple[int, ...]) -> LogitsState | None:
        """What drafter and target need to constrain the next tokens; None if the request has no constraints."""
        if not self.is_constrained:
            return None
        constraints = self.submit.sampling.constraints
        longest = max(map(len, constraints.bad_words), default=1)
        return LogitsState(
            constraints=constraints,
            # As in vLLM, min_tokens keeps the end token away also where it would not end the answer.
            end_token_ids=[*self.submit.stop_token_ids, *eos_token_ids],
            counts=self._token_counter.counts(),
            tail=self.tokens[max(self.num_prompt, len(self.tokens) - longest + 1) :],
            num_output=self.num_output,
        )

    @property
    def id(self) -> int:
        return self.submit.id

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def draft_room(self) -> int:
        """Tokens that a draft may bring, as another always comes behind them. Never grows: at 0 it drafts no more."""
        return self.submit.max_tokens - self.num_output - 1

    @property
    def root(self) -> int:
        """Position of the next tree's root. All before it is computed first, in chunks."""
        return max(self.num_prompt, len(self.tokens) - 1)

    @property
    def is_decoding(self) -> bool:
        return self.num_computed == self.root

    @property
    def num_feedable(self) -> int:
        """Drafter slots that can be filled now: slot j needs token j and, for EAGLE, the feature of position j - 1."""
        return min(self.num_computed + 1, len(self.tokens))
