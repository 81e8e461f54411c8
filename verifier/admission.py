"""Admission: a request's acceptance rule, its tree limits, and whether the engine can serve it at all."""

from __future__ import annotations

from verifier.request import Request
from verifier.scheduler import Limits
from workers.comm.ipc import Submit
from workers.config import DraftConfig, EngineConfig
from workers.types import Rule, TreeLimits

_DRAFTABLE_TOKENS = 3
"""The prompt yields the first token, and a step with a draft yields at least two more."""


def request_of(submit: Submit, config: EngineConfig) -> Request:
    """Return the engine's state of a submitted request."""
    first_draft_slot = int(config.draft is not None and config.draft.reads_features)
    return Request(submit, rule_of(submit, config.draft), tree_limits(submit, config.draft), first_draft_slot)


def rejection_reason(request: Request, max_model_len: int, limits: Limits, num_pages: int) -> str | None:
    """Return why an engine with `num_pages` pages, without the null page, cannot serve the request; None if it can."""
    prompt, asked = request.num_prompt, request.submit.max_tokens
    if prompt < 1 or asked < 1:
        return "a request needs at least one prompt token and max_tokens of at least 1"
    if prompt + asked > max_model_len:
        return f"prompt of {prompt} tokens + max_tokens {asked} exceeds max_model_len {max_model_len}"
    if limits.pages_for_life(request) > num_pages:
        return f"{prompt + asked} tokens do not fit the KV cache of {num_pages} pages"
    return None


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
        or draft.method == "ngram"
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
        min_prob=tree.prune.min_prob if asked.min_prob is None else asked.min_prob,
        path_prob=tree.prune.path_prob if asked.path_prob is None else asked.path_prob,
    )
