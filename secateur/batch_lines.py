"""The lines of batch files in OpenAI's format: requests in the input, answers in the output."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from secateur.errors import ConfigError, Problem


class BatchInputLine(BaseModel):
    """Example: {"custom_id": "q-1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f("}}"""

    model_config = ConfigDict(extra="forbid")

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]

    @model_validator(mode="after")
    def _whole_answers(self) -> Self:
        if self.body.get("stream"):
            raise ConfigError(Problem("body.stream", "a batch line is answered as a whole; remove stream"))
        return self


class BatchResponse(BaseModel):
    """The HTTP response to one line."""

    status_code: int
    request_id: str
    body: Any


class BatchLineError(BaseModel):
    """Why one line failed."""

    code: str
    message: str


class BatchOutputLine(BaseModel):
    """The answer to one input line: `error` is null exactly if it succeeded."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchLineError | None = None

    @property
    def succeeded(self) -> bool:
        """Return whether the service answered the line with status 200."""
        return self.error is None and self.response is not None and self.response.status_code == 200
