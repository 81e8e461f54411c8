"""The contestants of a speed comparison, and its settings."""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from bench.harness import BenchmarkPlan
from secateur.bench import PositiveInt, Some, Temperature
from secateur.errors import ConfigError, Problem
from secateur.token_tree import MAX_NODES

ContestantName = Literal[
    "off",
    "chain",
    "static",
    "dynamic",
    "auto",
    "draft_model",
    "generate",
    "generate_2_threads",
    "assisted",
    "prompt_lookup",
    "vllm",
    "vllm_eagle3",
    "vllm_ngram",
    "llamacpp",
    "openvino",
]
"""Secateur without and with speculation, the generation modes of transformers, and other projects."""
TRANSFORMERS: tuple[ContestantName, ...] = ("generate", "generate_2_threads", "assisted", "prompt_lookup")
PEERS: tuple[ContestantName, ...] = ("vllm", "vllm_eagle3", "vllm_ngram", "llamacpp", "openvino")
"""Contestants from other projects, which run in virtual environments of their own."""
ALONE: tuple[ContestantName, ...] = ("assisted", "prompt_lookup")
"""Contestants that answer one request at a time."""


class SpeedPlan(BenchmarkPlan):
    """The contestants and batch sizes of a speed comparison."""

    contestants: Some[ContestantName] = tuple(name for name in get_args(ContestantName) if name not in PEERS)
    batches: Some[PositiveInt] = (1, 4)
    """Requests in flight."""
    temperatures: Some[Temperature] = (0.0, 1.0)
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 16
    """Draft nodes of dynamic and static trees."""
    chain: Annotated[int, Field(ge=1, le=MAX_NODES)] = 5
    """Length of chains, for all contestants."""
    peer_threads: PositiveInt = 2
    """Threads with which each peer computes; ours are two processes of one thread, drafter and verifier."""
    num_prompts: PositiveInt = 2
    """Prompts per turn, at least one batch. Short turns end before the machine's speed drifts."""
    max_tokens: Annotated[int, Field(ge=2)] = 48
    """Tokens per answer; end-of-sequence tokens are ignored."""
    rounds: PositiveInt = 6
    """In each round, every contestant runs the next prompts once; the report gives medians."""
    prompt_tokens: tuple[PositiveInt, ...] = ()
    """Also time the first token behind random prompts of so many tokens [none]."""
    shared: bool = False
    """Let the last contestant's engine answer without speculation, too, instead of one that has no drafter."""
    seed: Annotated[int, Field(ge=0)] = 0
    peers: str = Field(default_factory=lambda: os.environ.get("SECATEUR_PEERS", ".peers"))
    """`make peers` puts the other projects here; the default is $SECATEUR_PEERS."""

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if "off" not in self.contestants:
            raise ConfigError(Problem("contestants", "must include off, which all ratios refer to"))
        return self
