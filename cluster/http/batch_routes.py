"""The routes of /v1/files and /v1/batches. Without a batch folder they say how to get one."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response
from starlette.requests import ClientDisconnect

from cluster.batches.files import Page
from cluster.batches.service import BatchService
from cluster.errors import not_found
from cluster.http.openapi import errors
from cluster.http.service import Service
from cluster.http.uploads import FORM, receive_upload
from cluster.openai.streaming import CLIENT_CLOSED_REQUEST
from secateur.batches_api import BatchList, BatchObject, CreateBatchRequest, DeletedFile, FileList, FileObject
from secateur.responses import IGNORED_HEADER

MAX_FILES_LISTED, MAX_LISTED = 10_000, 100

After = Annotated[str | None, Query(description="The id of the entry before the page.")]
NumFiles = Annotated[int, Query(ge=1, le=MAX_FILES_LISTED, description="How many entries a page has at most.")]
NumEntries = Annotated[int, Query(ge=1, le=MAX_LISTED, description="How many entries a page has at most.")]
Order = Annotated[Literal["asc", "desc"], Query(description="The oldest first, or the newest.")]
Purpose = Annotated[str | None, Query(description="Only files of this purpose: batch, or batch_output.")]


def add_batch_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    def folder() -> BatchService:
        if service.batches is None:
            message = "this service keeps no files and batches; start it with --batch-dir DIR"
            raise not_found(message, code="batches_not_enabled")
        return service.batches

    @app.post("/v1/files", response_model=FileObject, responses=errors(400, 404, 413), openapi_extra=FORM)
    async def upload_file(request: Request) -> Response:
        batches = folder()
        draft = batches.folder.draft_path()
        try:
            upload = await receive_upload(request, draft)
            return _json(await batches.add_file(draft, upload.filename, upload.expires_s, service.owner(request)))
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
        return _json(await folder().list_files(Page(limit, after, order), purpose, service.owner(request)))

    @app.get("/v1/files/{id}", response_model=FileObject, responses=errors(404))
    async def file(id: str, request: Request) -> Response:
        return _json(await folder().file(id, service.owner(request)))

    @app.delete("/v1/files/{id}", response_model=DeletedFile, responses=errors(404, 409))
    async def delete_file(id: str, request: Request) -> Response:
        await folder().delete_file(id, service.owner(request))
        return _json(DeletedFile(id=id))

    @app.get("/v1/files/{id}/content", response_class=FileResponse, responses=errors(404))
    async def file_content(id: str, request: Request) -> Response:
        found = await folder().file(id, service.owner(request))
        return FileResponse(folder().folder.path(id), media_type="application/jsonl", filename=found.filename)

    @app.post("/v1/batches", response_model=BatchObject, responses=errors(400, 404, 413))
    async def create_batch(body: CreateBatchRequest, request: Request) -> Response:
        created = await folder().create_batch(body, service.owner(request))
        # The client chose these names: remove what could end the header, and bound its length.
        ignored = ", ".join(body.ignored())[:1024].encode("ascii", "replace").decode()
        names = "".join(char if char.isprintable() else "?" for char in ignored)
        return _json(created, {IGNORED_HEADER: names} if names else None)

    @app.get("/v1/batches", response_model=BatchList, responses=errors(400, 404))
    async def list_batches(request: Request, limit: NumEntries = 20, after: After = None) -> Response:
        return _json(await folder().list_batches(Page(limit, after), service.owner(request)))

    @app.get("/v1/batches/{id}", response_model=BatchObject, responses=errors(404))
    async def batch(id: str, request: Request) -> Response:
        return _json(await folder().batch(id, service.owner(request)))

    @app.post("/v1/batches/{id}/cancel", response_model=BatchObject, responses=errors(404, 409))
    async def cancel_batch(id: str, request: Request) -> Response:
        return _json(await folder().cancel_batch(id, service.owner(request)))


def _json(model: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), media_type="application/json", headers=headers)
