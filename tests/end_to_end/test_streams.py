"""Two hundred concurrent streams over HTTP: each has the output of the same request alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.local_service import local_service
from secateur import AsyncClient, Client
from secateur.config import EngineArgs
from tests.support.engines import prompts

pytestmark = pytest.mark.slow

NUM_STREAMS, PER_CLIENT = 200, 50  # a client opens at most 100 connections
OFF = {"tree_prune": "off"}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "speculative": OFF},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "speculative": OFF | {"acceptance": "rejection"}},
    {"temperature": 0.7, "speculative": {"enabled": False}},
]


def requests() -> list[dict[str, Any]]:
    """Return prompts of many lengths; groups of four share a prefix."""
    texts = prompts()
    return [
        {
            "prompt": texts[i // 4][: 30 + 7 * (i % 4)],
            "max_tokens": 5 + i % 6,
            "seed": i,
            "ignore_eos": True,
            "return_token_ids": True,
            **KINDS[i % len(KINDS)],
        }
        for i in range(NUM_STREAMS)
    ]


class Streams:
    """Counts the open streams, and their maximum."""

    def __init__(self) -> None:
        self.num_open = self.most = 0

    async def read(self, client: AsyncClient, request: dict[str, Any]) -> list[list[int]]:
        """Return the tokens of each chunk."""
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        asked = {name: value for name, value in request.items() if name != "prompt"}
        stream = client.stream_complete(request["prompt"], **asked)
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
        self.num_open -= 1
        assert [choice.finish_reason for choice in chunks if choice.finish_reason] == ["length"]
        return [choice.token_ids or [] for choice in chunks]

    async def read_all(self, url: str) -> list[list[list[int]]]:
        clients = [AsyncClient(url) for _ in range(NUM_STREAMS // PER_CLIENT)]
        try:
            return await asyncio.gather(
                *(self.read(clients[i // PER_CLIENT], request) for i, request in enumerate(requests()))
            )
        finally:
            for client in clients:
                await client.close()


def test_two_hundred_streams_have_the_outputs_of_single_ones() -> None:
    args = {"port": 0, "device": "cpu", "max_num_seqs": 48, "max_model_len": 256, "max_num_batched_tokens": 512}
    with local_service(EngineArgs.load(args)) as url, Client(url) as client:
        streams = Streams()
        together = asyncio.run(streams.read_all(url))
        assert streams.most == NUM_STREAMS and streams.num_open == 0
        num_parted = 0
        for request, chunks in list(zip(requests(), together, strict=True))[::7]:  # of every kind and shared prefix
            prompt = request.pop("prompt")
            alone = client.complete(prompt, **request)
            if [token for chunk in chunks for token in chunk] != alone.choices[0].token_ids:
                assert "acceptance" in request["speculative"], "a seed promises no tokens under rejection alone"
                num_parted += 1
            assert len(alone.choices[0].token_ids) == request["max_tokens"]
        assert num_parted <= 2, "of 6"
