"""The bodies of /v1/files and /v1/batches: what a request says, and the objects of the answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from secateur.bodies import Body, Metadata
from secateur.responses import Listed, Nullable, ObjectList, Response

HOUR_S, MONTH_S = 3600, 30 * 24 * 3600

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class ExpiresAfter(Body):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    """The moment from which the seconds count: the file's creation."""
    seconds: Annotated[int, Field(ge=HOUR_S, le=MONTH_S)]
    """Seconds until then, an hour to 30 days."""


class CreateBatchRequest(Body):
    """POST /v1/batches."""

    input_file_id: str
    """An uploaded file with a request in each line."""
    endpoint: Endpoint
    """The route of all its requests."""
    completion_window: Literal["24h"]
    """The time after which requests without an answer are given up."""
    metadata: Metadata | None = None
    """Returned as it is."""
    output_expires_after: ExpiresAfter | None = None
    """When the files with the answers are deleted; without it, they stay."""

    def ignored(self) -> list[str]:
        """Return unknown fields, sorted."""
        return sorted(self.model_extra or {})


class FileObject(Listed):
    """An uploaded file, or one with the answers of a batch."""

    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: str = "processed"


class DeletedFile(Response):
    """DELETE /v1/files/{id}."""

    id: str
    object: str = "file"
    deleted: bool = True


class InvalidLine(Response):
    """Why a batch cannot be run: the problem, the field, and the number of the line, which counts from 1."""

    code: str
    message: str
    param: Nullable[str] = None
    line: Nullable[int] = None


class InvalidLines(Response):
    """The `errors` of a batch that failed."""

    object: str = "list"
    data: list[InvalidLine]


class RequestCounts(Response):
    """How many requests a batch has, how many of them have an answer, and how many an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Listed):
    """A batch. Times are Unix seconds, null until they come."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: Nullable[InvalidLines] = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: Nullable[str] = None
    error_file_id: Nullable[str] = None
    created_at: int
    in_progress_at: Nullable[int] = None
    expires_at: Nullable[int] = None
    finalizing_at: Nullable[int] = None
    completed_at: Nullable[int] = None
    failed_at: Nullable[int] = None
    expired_at: Nullable[int] = None
    cancelling_at: Nullable[int] = None
    cancelled_at: Nullable[int] = None
    request_counts: RequestCounts
    metadata: Nullable[dict[str, Any]] = None


class FileList(ObjectList[FileObject]):
    """GET /v1/files."""


class BatchList(ObjectList[BatchObject]):
    """GET /v1/batches."""
