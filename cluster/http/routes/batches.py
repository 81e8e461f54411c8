"""The routes of /v1/files and /v1/batches. Without a batch folder they say how to get one."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response
from starlette.requests import ClientDisconnect

from cluster.batches import batches, files
from cluster.batches.database import Page
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
        folder = _folder(service)
        draft = folder.folder.draft_path()
        try:
            upload = await receive_upload(request, draft)
            return json_reply(await folder.add_file(draft, upload.filename, upload.expires_s, service.owner(request)))
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
        part = Page(limit, after, order)
        database, owner = _folder(service).database, service.owner(request)
        return json_reply(await database.run(files.page, part, owner, time.time(), purpose))

    @app.get("/v1/files/{id}", response_model=FileObject, responses=errors(404))
    async def file(id: str, request: Request) -> Response:
        return json_reply(await _folder(service).database.run(files.find, id, service.owner(request), time.time()))

    @app.delete("/v1/files/{id}", response_model=DeletedFile, responses=errors(404, 409))
    async def delete_file(id: str, request: Request) -> Response:
        folder = _folder(service)
        await folder.database.run(files.delete, id, service.owner(request), time.time())
        await asyncio.to_thread(folder.folder.delete, [id])
        return json_reply(DeletedFile(id=id))

    @app.get("/v1/files/{id}/content", response_class=FileResponse, responses=errors(404))
    async def file_content(id: str, request: Request) -> Response:
        folder = _folder(service)
        found = await folder.database.run(files.find, id, service.owner(request), time.time())
        return FileResponse(folder.folder.path(id), media_type="application/jsonl", filename=found.filename)


def add_batch_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of /v1/batches."""

    @app.post("/v1/batches", response_model=BatchObject, responses=errors(400, 404, 413))
    async def create_batch(body: CreateBatchRequest, request: Request) -> Response:
        folder, owner = _folder(service), service.owner(request)
        created = await folder.database.run(batches.create, body, owner, service.model_id, time.time())
        folder.wake()
        return json_reply(created, ignored_header(request, body.ignored()))

    @app.get("/v1/batches", response_model=BatchList, responses=errors(400, 404))
    async def list_batches(request: Request, limit: NumEntries = 20, after: After = None) -> Response:
        owner = service.owner(request)
        return json_reply(await _folder(service).database.run(batches.page, Page(limit, after), owner))

    @app.get("/v1/batches/{id}", response_model=BatchObject, responses=errors(404))
    async def batch(id: str, request: Request) -> Response:
        return json_reply(await _folder(service).database.run(batches.find, id, service.owner(request)))

    @app.post("/v1/batches/{id}/cancel", response_model=BatchObject, responses=errors(404, 409))
    async def cancel_batch(id: str, request: Request) -> Response:
        folder, owner = _folder(service), service.owner(request)
        cancelled = await folder.database.run(batches.cancel, id, owner, time.time())
        folder.wake()
        return json_reply(cancelled)
