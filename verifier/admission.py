"""Admission: a request's state on arrival, and whether the engine can serve it at all."""

from __future__ import annotations

from verifier.request import Request
from verifier.scheduler import Limits
from verifier.speculation import rule_of, tree_limits
from workers.comm.ipc import Submit
from workers.config import EngineConfig
from workers.models.draft_methods import method_of


def request_of(submit: Submit, config: EngineConfig) -> Request:
    """Return the engine's state of a submitted request."""
    draft, size = config.draft, config.page_size
    reads_features = draft is not None and method_of(draft).reads_features
    feed_first = len(submit.prompt) // size * size if reads_features and config.enable_prefix_caching else 0
    ends = set(submit.stop_token_ids)
    if submit.sampling.constraints.grammar or not submit.ignore_eos:
        ends.update(config.eos_token_ids)  # nothing may follow a text that its grammar has let end
    return Request(
        submit, rule_of(submit, draft), tree_limits(submit, draft), int(reads_features), feed_first, frozenset(ends)
    )


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
