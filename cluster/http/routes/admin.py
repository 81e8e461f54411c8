"""Adds the route that changes the service while it runs: /admin/drafter, which swaps the draft head, or scores one."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from cluster.errors import BadRequest, HttpError, not_found, unavailable
from cluster.http.api_keys import matching_key
from cluster.http.openapi import errors
from cluster.http.service import Service
from secateur.api_keys import ApiKey
from secateur.errors import ConfigError
from secateur.responses import ErrorResponse
from workers.comm.ipc import HeadSwapped
from workers.settings import HeadAction


class SwapDrafter(BaseModel):
    """The head that drafts from now on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str | None, Field(description="A folder or a Hugging Face id; null = the head before this one.")]
    canary_steps: Annotated[
        int | None,
        Field(ge=0, le=1_000_000, description="Only score the head, in so many steps; 0 = end that; null = swap."),
    ] = None


def add_admin_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    def check_key(request: Request) -> None:
        if service.admin_api_key is None:
            message = "this service cannot be changed; start it with --admin-api-key KEY or SECATEUR_ADMIN_API_KEY"
            raise not_found(message, code="admin_not_enabled")
        given = request.headers.get("authorization", "").encode("latin-1")
        if matching_key(given, (ApiKey(key=service.admin_api_key),)) is None:
            message = "missing or wrong admin key; send 'Authorization: Bearer KEY' with that of --admin-api-key"
            body = ErrorResponse.of(message, type="authentication_error", code="invalid_api_key")
            raise HttpError(401, body)

    async def asked(action: HeadAction, path: str = "", num_steps: int = 0) -> HeadSwapped:
        ended = await service.engine.swap_head(path, action, num_steps)
        if ended.error is not None:
            raise unavailable(f"{path} was not taken over: {ended.error}" if path else ended.error)
        return ended

    def scores(ended: HeadSwapped) -> dict[str, Any]:
        if not ended.scores:
            raise not_found("no head is being scored; send one with canary_steps", code="no_canary")
        return {"object": "drafter.canary", "replica": service.replica} | json.loads(ended.scores)

    @app.get("/admin/drafter", responses=errors(401, 404, 503), dependencies=[Depends(check_key)])
    async def drafter_canary() -> dict[str, Any]:
        return scores(await asked(HeadAction.TELL))

    @app.post("/admin/drafter", responses=errors(400, 401, 404, 503), dependencies=[Depends(check_key)])
    async def swap_drafter(body: SwapDrafter) -> dict[str, Any]:
        from cluster.head_check import checked_head  # imports torch

        steps = body.canary_steps
        if steps == 0:
            return scores(await asked(HeadAction.END))
        try:
            serving = None if steps is None else service.heads()[-1]["model"]
            path = await asyncio.to_thread(checked_head, service.config, body.model or service.head_before(), serving)
        except ConfigError as error:
            raise BadRequest(str(error), param="model", code="unsuitable_head") from None
        if steps is not None:
            return scores(await asked(HeadAction.SCORE, path, steps))
        await asked(HeadAction.TAKE, path)
        old, new = service.heads()[-2:]
        return {"object": "drafter.swap", "replica": service.replica, "old": old, "new": new}
