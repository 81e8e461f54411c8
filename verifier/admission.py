"""What is settled once and for all when a request arrives: its acceptance rule, its trees' limits, whether it fits."""

from __future__ import annotations

from verifier.request import Request
from verifier.scheduler import Limits
from workers.comm.ipc import Submit
from workers.config import DraftConfig, EngineConfig
from workers.types import Rule, TreeLimits

_DRAFTABLE_TOKENS = 3
"""The first token comes from the prompt, and what a draft brings are at least two."""


def request_of(submit: Submit, config: EngineConfig) -> Request:
    first_draft_slot = int(config.draft is not None and config.draft.reads_features)
    return Request(submit, rule_of(submit, config.draft), _tree_limits(submit, config.draft), first_draft_slot)


def rejection_reason(request: Request, max_model_len: int, limits: Limits, num_pages: int) -> str | None:
    """Why an engine of so many pages, the null page not counted, can never serve the request; None if it can."""
    prompt, asked = request.num_prompt, request.submit.max_tokens
    if prompt < 1 or asked < 1:
        return "a request needs at least one prompt token and max_tokens of at least 1"
    if prompt + asked > max_model_len:
        return f"prompt of {prompt} tokens + max_tokens {asked} exceeds max_model_len {max_model_len}"
    if limits.pages_for_life(request) > num_pages:
        return f"{prompt + asked} tokens do not fit the KV cache of {num_pages} pages"
    return None


def rule_of(submit: Submit, draft: DraftConfig | None) -> Rule:
    """The rule of one request under the service's drafter (None = there is none).

    Changing it later would bias the output. `rejection` samples its drafts unless draft probabilities are off, drafting
    is greedy, the method has none to give, or the temperature is below the service's minimum, where the most likely
    tokens are accepted as often.
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


def _tree_limits(submit: Submit, draft: DraftConfig | None) -> TreeLimits | None:
    """The server's tree limits narrowed by the request's `speculative` object; None if it is never drafted for."""
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
