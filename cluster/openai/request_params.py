"""Converts a SamplingRequest to the engine's Submits.

A request beyond the running engine's limits raises a BadRequest that names the limit.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cluster.copying import copied
from cluster.errors import BadRequest
from cluster.system.shared import Shared
from secateur.bodies import listed
from secateur.requests import ChatCompletionRequest, SamplingRequest
from secateur.speculative import Speculative
from workers.comm.ipc import Speculation, Submit
from workers.config import EngineConfig, TreeRules
from workers.settings import Constraints, SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The engine's limits for a request."""

    config: EngineConfig
    max_model_len: int
    vocab_size: int
    default_max_tokens: int | None = None
    """The `max_tokens` of a chat that sets none. None means the rest of the context."""


def build_submits(
    request: SamplingRequest,
    prompt: list[int],
    *,
    ids: Sequence[int],
    seed: int,
    limits: RequestLimits,
    bad_words: Sequence[list[int]] = (),
    grammar: str = "",
    may_learn: bool = True,
    tenant: int = 0,
) -> list[Submit]:
    """Return the engine requests of one prompt's `n` choices, which have these ids. Raises BadRequest.

    Choice 0 has the request's seed, or `seed` if it has none (see `SeedSource`); choice j has the seed H(seed, j).
    `bad_words` are the request's, tokenized; `grammar` is that of its structure. may_learn, tenant: see `Submit`.
    """
    if request.priority and limits.config.scheduling_policy != "priority":
        raise BadRequest(
            f"priority={request.priority}: this service serves requests in order of arrival; leave it out, or start "
            "the service with --scheduling-policy priority",
            param="priority",
        )
    prompt = truncate(
        prompt,
        request.truncate_prompt_tokens,
        limits,
        room_for=request.max_output_tokens or 1,
        side=request.truncation_side,
    )
    max_tokens = _max_tokens(request, prompt, limits)
    _check_min_tokens(request.min_tokens, max_tokens, len(prompt), limits)
    first = copied(
        Submit,
        request,
        id=ids[0],
        prompt=prompt,
        max_tokens=max(1, max_tokens),  # the only token of an answer of 0 tokens is not returned
        sampling=copied(
            SamplingSettings,
            request,
            temperature=0.0 if request.is_greedy else request.temperature,
            top_k=request.top_k if 0 < request.top_k < limits.vocab_size else 0,
            seed=seed if request.seed is None else request.seed,
            constraints=replace(_constraints(request, bad_words, limits), grammar=grammar),
            logprob_token_ids=_distinct(request.logprob_token_ids),
        ),
        stop_token_ids=list(dict.fromkeys(request.stop_token_ids)),
        speculation=_speculation(request.speculative, limits),
        may_learn=may_learn and request.store is not False,
        tenant=tenant,
        has_trees=request.return_speculative_trees and max_tokens > 0,
    )
    seed = first.sampling.seed
    return [
        first,
        *(
            replace(
                first,
                id=id,
                sampling=replace(first.sampling, seed=derive_seed(seed, number)),
                # A whole response takes the prompt's log-probabilities from the first choice.
                num_prompt_logprobs=first.num_prompt_logprobs if request.stream else None,
            )
            for number, id in enumerate(ids[1:], start=1)
        ),
    ]


def _check_min_tokens(min_tokens: int, max_tokens: int, num_prompt: int, limits: RequestLimits) -> None:
    if min_tokens <= max_tokens:
        return
    if max_tokens == limits.default_max_tokens:
        raise BadRequest(
            f"min_tokens={min_tokens} is more than max_tokens={max_tokens}, this model's default; write max_tokens as "
            "well",
            param="min_tokens",
        )
    raise BadRequest(
        f"min_tokens={min_tokens} is more than the {max_tokens} that {num_prompt} prompt tokens leave of this model's "
        f"{limits.max_model_len}; ask for at most {max_tokens}",
        param="min_tokens",
        code="context_length_exceeded",
    )


def truncate(
    prompt: list[int],
    keep: int | None,
    limits: RequestLimits,
    *,
    room_for: int = 0,
    side: Literal["left", "right"] = "left",
) -> list[int]:
    """Return the last `keep` tokens of a prompt; None keeps all, -1 what the context has beside `room_for` tokens.

    side: right keeps the first tokens instead. Raises BadRequest if `keep` is more than the context.
    """
    if keep is None:
        return prompt
    if keep > limits.max_model_len:
        raise BadRequest(
            f"truncate_prompt_tokens={keep} is more than this model's maximum context length of {limits.max_model_len}",
            param="truncate_prompt_tokens",
        )
    number = max(1, limits.max_model_len - room_for) if keep == -1 else keep
    return prompt[-number:] if side == "left" else prompt[:number]


def _constraints(request: SamplingRequest, bad_words: Sequence[list[int]], limits: RequestLimits) -> Constraints:
    for param, ids in (
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids or ()),
        ("logprob_token_ids", request.logprob_token_ids or ()),
        ("bad_words", [id for word in bad_words for id in word]),
    ):
        if beyond := [id for id in ids if id >= limits.vocab_size]:
            ids_are = "token id {} is" if len(beyond) == 1 else "token ids {} are"
            unknown_ids = ids_are.format(listed(map(str, beyond)))
            raise BadRequest(f"{param}: {unknown_ids} not in the vocabulary of {limits.vocab_size}", param=param)
    allowed = _distinct(request.allowed_token_ids)
    if allowed is not None:
        never = {word[0] for word in bad_words if len(word) == 1}
        if request.min_tokens:
            never.update(request.stop_token_ids, () if request.ignore_eos else limits.config.eos_token_ids)
        if never.issuperset(allowed):
            raise BadRequest(
                "allowed_token_ids: bad_words and min_tokens forbid all of them; allow a token that may come first",
                param="allowed_token_ids",
            )
    words = [list(word) for word in bad_words]
    return copied(Constraints, request, bad_words=words, allowed_token_ids=allowed)


def _distinct(ids: list[int] | None) -> list[int] | None:
    return None if ids is None else list(dict.fromkeys(ids))


def _max_tokens(request: SamplingRequest, prompt: list[int], limits: RequestLimits) -> int:
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    if not prompt:
        raise BadRequest("the prompt has no tokens", param=param)
    if max(prompt) >= limits.vocab_size:
        raise BadRequest(f"token id {max(prompt)} is not in the vocabulary of {limits.vocab_size}", param=param)
    room, context = limits.max_model_len - len(prompt), limits.max_model_len
    if room < 1:
        raise BadRequest(
            f"this model's maximum context length is {context} tokens and the prompt has {len(prompt)}; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    requested = request.max_completion_tokens or request.max_tokens
    if requested is None:  # a default length is cut to the context
        return min(request.max_output_tokens or limits.default_max_tokens or room, room)
    if requested > room:
        param = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        raise BadRequest(
            f"this model's maximum context length is {context} tokens, but {len(prompt)} prompt tokens and "
            f"{param}={requested} make {len(prompt) + requested}; ask for at most {room}",
            param=param,
            code="context_length_exceeded",
        )
    return requested


def _speculation(options: Speculative | None, limits: RequestLimits) -> Speculation:
    if options is None:
        return Speculation()
    draft, nodes = limits.config.draft, options.num_speculative_tokens
    if draft is None and options.enabled is not False and options.model_fields_set:
        raise BadRequest("speculative: this service runs without a drafter; leave it out", param="speculative")
    most = draft.tree.num_speculative_tokens if draft is not None else 0
    if nodes is not None and nodes > most:
        message = f"speculative.num_speculative_tokens: {nodes} is more than this service's {most}"
        raise BadRequest(message, param="speculative")
    off = options.tree_prune == "off"
    rules = {name: 0.0 if off else getattr(options, f"tree_prune_{name}") for name in TreeRules.names()}
    return Speculation(
        enabled=options.enabled is not False,
        num_speculative_tokens=nodes,
        auto=None if options.tree_prune is None else options.tree_prune == "auto",
        rules={name: value for name, value in rules.items() if value is not None},
        acceptance=options.acceptance,
        draft_probs=options.enable_draft_probs,
    )


def ineffective_settings(options: Speculative | None, limits: RequestLimits) -> list[str]:
    """Return the settings of a `speculative` object that have no effect under its acceptance rule."""
    if options is None or options.enable_draft_probs is None:
        return []
    draft = limits.config.draft
    rule = options.acceptance or (draft.acceptance.kind if draft is not None else "coupled")
    return ["speculative.enable_draft_probs"] if rule == "coupled" else []


class SeedSource:
    """Seeds for requests without one: H(server seed, arrival number), or random if the server has no seed."""

    def __init__(self, server_seed: int | None, shared: Shared | None = None) -> None:
        self._server_seed = server_seed
        self._shared = shared or Shared()
        self._arrivals = self._shared.array("arrivals", (1,), np.int64)  # at all fronts

    def draw(self, count: int, key: str | None = None) -> tuple[int, ...]:
        """Return the seeds of a request's prompts. Without a server seed, the same key gives the same ones again."""
        if key is None or self._server_seed is not None:
            return tuple(self.next() for _ in range(count))
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return tuple(derive_seed(int.from_bytes(digest, "little"), number) for number in range(count))

    def next(self) -> int:
        """Return the next prompt's seed."""
        if self._server_seed is None:
            return secrets.randbits(63)
        with self._shared.locked():
            arrival = int(self._arrivals[0])
            self._arrivals[0] += 1
        return derive_seed(self._server_seed, arrival)


def derive_seed(seed: int, number: int) -> int:
    """Return H(seed, number), 63 bits of BLAKE2b: the same on every machine and in every version."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
