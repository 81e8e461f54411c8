"""A request's acceptance rule and the limits of its trees: the service's, narrowed by its `speculative` object.

Like all that the service front imports at once, this module does without torch.
"""

from __future__ import annotations

from workers.comm.ipc import Submit
from workers.config import DraftConfig
from workers.models.draft_methods import method_of
from workers.settings import Rule, TreeLimits

_DRAFTABLE_TOKENS = 3
"""The prompt yields the first token, and a step with a draft yields at least two more."""


def rule_of(submit: Submit, draft: DraftConfig | None) -> Rule:
    """Return the acceptance rule of a request; it never changes, because a change would bias the output.

    Under `rejection` drafts are sampled, with four exceptions: draft probabilities are off, drafting is greedy, the
    method has no probabilities, or the temperature is below the service's minimum. At such temperatures the most likely
    tokens are accepted as often as sampled ones. draft: None = the service has no drafter.
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
        or not method_of(draft).is_model
        or temperature == 0
        or temperature < acceptance.min_temperature
    ):
        return Rule.TARGET_ONLY
    return Rule.TRAVERSAL if acceptance.rejection_method == "traversal" else Rule.RECURSIVE


def tree_limits(submit: Submit, draft: DraftConfig | None) -> TreeLimits | None:
    """Return the server's tree limits, narrowed by the request's `speculative` object; None if it gets no drafts."""
    asked = submit.speculation
    if draft is None or not asked.enabled or submit.max_tokens < _DRAFTABLE_TOKENS:
        return None
    tree, limit = draft.tree, draft.tree.num_speculative_tokens
    if asked.num_speculative_tokens is not None:
        limit = min(limit, asked.num_speculative_tokens)
    return TreeLimits(
        num_speculative_tokens=limit,
        auto=tree.prune.auto if asked.auto is None else asked.auto,
        **dict(zip(tree.prune.names(), tree.prune.values, strict=True)) | asked.rules,
    )
