"""The routes of /v1/files and /v1/batches. Without a batch folder they say how to get one."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response
from starlette.requests import ClientDisconnect

from cluster.batches.files import Page
from cluster.batches.service import BatchService
from cluster.errors import not_found
from cluster.http.openapi import errors
from cluster.http.replies import ignored_header, json_reply
from cluster.http.service import Service
from cluster.http.uploads import FORM, receive_upload
from cluster.openai.streaming import CLIENT_CLOSED_REQUEST
from secateur.batches_api import BatchList, BatchObject, CreateBatchRequest, DeletedFile, FileList, FileObject

MAX_FILES_LISTED, MAX_LISTED = 10_000, 100

After = Annotated[str | None, Query(description="The id of the entry before the page.")]
NumFiles = Annotated[int, Query(ge=1, le=MAX_FILES_LISTED, description="How many entries a page has at most.")]
NumEntries = Annotated[int, Query(ge=1, le=MAX_LISTED, description="How many entries a page has at most.")]
Order = Annotated[Literal["asc", "desc"], Query(description="The oldest first, or the newest.")]
Purpose = Annotated[str | None, Query(description="Only files of this purpose: batch, or batch_output.")]


def _folder(service: Service) -> BatchService:
    if service.batches is None:
        message = "this service keeps no files and batches; start it with --batch-dir DIR"
        raise not_found(message, code="batches_not_enabled")
    return service.batches


def add_file_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of /v1/files."""

    @app.post("/v1/files", response_model=FileObject, responses=errors(400, 404, 413), openapi_extra=FORM)
    async def upload_file(request: Request) -> Response:
        batches = _folder(service)
        draft = batches.folder.draft_path()
        try:
            upload = await receive_upload(request, draft)
            return json_reply(await batches.add_file(draft, upload.filename, upload.expires_s, service.owner(request)))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            await asyncio.to_thread(draft.unlink, missing_ok=True)

    @app.get("/v1/files", response_model=FileList, responses=errors(400, 404))
    async def list_files(
        request: Request,
        purpose: Purpose = None,
        limit: NumFiles = MAX_FILES_LISTED,
        after: After = None,
        order: Order = "desc",
    ) -> Response:
        return json_reply(await _folder(service).list_files(Page(limit, after, order), purpose, service.owner(request)))

    @app.get("/v1/files/{id}", response_model=FileObject, responses=errors(404))
    async def file(id: str, request: Request) -> Response:
        return json_reply(await _folder(service).file(id, service.owner(request)))

    @app.delete("/v1/files/{id}", response_model=DeletedFile, responses=errors(404, 409))
    async def delete_file(id: str, request: Request) -> Response:
        await _folder(service).delete_file(id, service.owner(request))
        return json_reply(DeletedFile(id=id))

    @app.get("/v1/files/{id}/content", response_class=FileResponse, responses=errors(404))
    async def file_content(id: str, request: Request) -> Response:
        found = await _folder(service).file(id, service.owner(request))
        return FileResponse(_folder(service).folder.path(id), media_type="application/jsonl", filename=found.filename)


def add_batch_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of /v1/batches."""

    @app.post("/v1/batches", response_model=BatchObject, responses=errors(400, 404, 413))
    async def create_batch(body: CreateBatchRequest, request: Request) -> Response:
        created = await _folder(service).create_batch(body, service.owner(request))
        return json_reply(created, ignored_header(request, body.ignored()))

    @app.get("/v1/batches", response_model=BatchList, responses=errors(400, 404))
    async def list_batches(request: Request, limit: NumEntries = 20, after: After = None) -> Response:
        return json_reply(await _folder(service).list_batches(Page(limit, after), service.owner(request)))

    @app.get("/v1/batches/{id}", response_model=BatchObject, responses=errors(404))
    async def batch(id: str, request: Request) -> Response:
        return json_reply(await _folder(service).batch(id, service.owner(request)))

    @app.post("/v1/batches/{id}/cancel", response_model=BatchObject, responses=errors(404, 409))
    async def cancel_batch(id: str, request: Request) -> Response:
        return json_reply(await _folder(service).cancel_batch(id, service.owner(request)))
