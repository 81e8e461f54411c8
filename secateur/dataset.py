"""Answers to the rows of a Ray Dataset, or of any table of columns, by running services.

    rows = ray.data.read_parquet("questions.parquet")
    rows.map_batches(
        AnswerRows, fn_constructor_kwargs={"base_url": url, "max_tokens": 64}, batch_size=64, concurrency=2
    ).write_parquet("answers")

Ray Data cuts the rows into batches, places the workers, and retries what is lost; this class sends one batch at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from secateur.client import DEFAULT_BASE_URL, DEFAULT_TIMEOUT_S
from secateur.client_http import Call, chat_call, complete_call
from secateur.endpoints import EndpointPool
from secateur.errors import APIError, AuthenticationError, ConfigError, Problem
from secateur.retries import OUTAGE_TIMEOUT_S

COLUMNS = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "error")
"""The columns that answers add."""


class _AnswerRow(NamedTuple):
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


class AnswerRows:
    """A callable class for `Dataset.map_batches`: columns in, the same columns and those of `COLUMNS` out.

    A row is a column `prompt` (a text) or `messages` (a text or a conversation). `params` are fields of every request.
    Of several `base_url`, each row goes to the one with the fewest pending requests. A row that the service refuses has
    nulls and an `error`. Raises ConfigError for a table without either column, AuthenticationError for a wrong key, and
    APIConnectionError if none answers for `outage_timeout` seconds, so that Ray repeats the batch or ends the job.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_BASE_URL,
        *,
        api_key: str | None = None,
        retries: int = 5,
        timeout: float = DEFAULT_TIMEOUT_S,
        outage_timeout: float = OUTAGE_TIMEOUT_S,
        **params: Any,
    ) -> None:
        self._base_urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self._settings: dict[str, Any] = {
            "api_key": api_key,
            "retries": retries,
            "timeout": timeout,
            "outage_timeout": outage_timeout,
        }
        self._params = params

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer all rows of a batch at once. `batch` has one sequence per column."""
        answers = asyncio.run(self._answer_all(self._calls(batch)))
        columns = zip(*answers, strict=True) if answers else [()] * len(COLUMNS)
        return {**batch, **dict(zip(COLUMNS, map(list, columns), strict=True))}

    def _calls(self, batch: Mapping[str, Any]) -> list[Call[Any]]:
        if ("prompt" in batch) == ("messages" in batch):
            raise ConfigError(Problem("batch", f"needs a column 'prompt' or 'messages', not {sorted(batch)}"))
        if "prompt" in batch:
            return [complete_call(str(prompt), self._params) for prompt in batch["prompt"]]
        return [
            chat_call(messages if isinstance(messages, str) else list(messages), self._params)
            for messages in batch["messages"]
        ]

    async def _answer_all(self, calls: Sequence[Call[Any]]) -> list[_AnswerRow]:
        async with EndpointPool(self._base_urls, **self._settings) as pool:
            return await asyncio.gather(*(self._answer(pool, call) for call in calls))

    @staticmethod
    async def _answer(pool: EndpointPool, call: Call[Any]) -> _AnswerRow:
        try:
            answer = await pool.call(call)
        except AuthenticationError:
            raise
        except APIError as error:
            return _AnswerRow(error=str(error))
        usage = answer.usage
        return _AnswerRow(
            text=answer.text,
            finish_reason=answer.choices[0].finish_reason,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
        )
