"""Batch files, and an in-process service that answers their lines."""

import asyncio
import json
from pathlib import Path

import httpx2

from secateur.batch import run_batch
from secateur.batch_lines import BatchOutputLine
from secateur.batch_progress import BatchSummary
from secateur.client import AsyncClient
from secateur.responses import CompletionChoice, CompletionResponse, ModelList, Usage

ANSWER = CompletionResponse(
    model="m", choices=[CompletionChoice(text="x", finish_reason="stop")], usage=Usage.of(2, 3)
).model_dump_json()
MODELS = ModelList().model_dump_json()


def line(custom_id: str, **fields) -> dict:
    body = {"prompt": custom_id, "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **fields}


def write(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
    return path


def read_output(path: Path) -> dict[str, BatchOutputLine]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    lines = [BatchOutputLine.model_validate_json(raw) for raw in data[:-1].split(b"\n")]
    assert len({item.custom_id for item in lines}) == len(lines), "a custom_id is there twice"
    return {item.custom_id: item for item in lines}


class Service:
    """An in-process service. `fails` maps a prompt to its status. Counts the requests in flight."""

    def __init__(self, fails: dict[str, int] | None = None, answer: str = ANSWER) -> None:
        self.fails, self.answer = fails or {}, answer
        self.asked: list[str] = []
        self.request_ids: list[str] = []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, text=MODELS)
        prompt = json.loads(request.content)["prompt"]
        self.asked.append(prompt)
        self.request_ids.append(request.headers["x-request-id"])
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if status := self.fails.get(prompt):
            return httpx2.Response(status, json={"error": {"message": "no", "code": "bad"}})
        return httpx2.Response(200, text=self.answer)

    def run(self, source: Path, output: Path, **settings) -> BatchSummary:
        client = AsyncClient(transport=httpx2.MockTransport(self), retries=0)
        return run_batch(source, output, client=client, progress=False, **settings)
