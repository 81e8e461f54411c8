"""Which acceptance rule a request gets, decided once when it is admitted; changing it later would bias the output."""

from __future__ import annotations

from workers.config import DraftConfig
from workers.ipc import Submit
from workers.types import Rule


def rule_of(submit: Submit, draft: DraftConfig | None) -> Rule:
    """The rule of one request under the service's drafter (None = there is none).

    `rejection` samples its drafts unless draft probabilities are off, drafting is greedy, the method has none to give,
    or the temperature is below the service's minimum, where the most likely tokens are accepted as often.
    """
    asked = submit.speculation
    kind = asked.acceptance or (draft.acceptance.kind if draft else "coupled")
    if kind == "coupled" or draft is None or not asked.enabled:
        return Rule.COUPLED
    acceptance = draft.acceptance
    wanted = acceptance.draft_probs if asked.draft_probs is None else asked.draft_probs
    temperature = submit.sampling.temperature
    if (
        not wanted
        or acceptance.sample_method == "greedy"
        or draft.method == "ngram"
        or temperature == 0
        or temperature < acceptance.min_temperature
    ):
        return Rule.TARGET_ONLY
    return Rule.TRAVERSAL if acceptance.rejection_method == "traversal" else Rule.RECURSIVE
