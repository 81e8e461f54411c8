"""Adds the routes for operators and probes: health, load, metrics, versions and the inspector's page."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cluster.errors import unavailable
from cluster.http.error_handlers import error_response
from cluster.http.inspector import inspector_page
from cluster.http.openapi import errors
from cluster.http.service import Service
from cluster.observe import metrics
from secateur import __version__


def add_operation_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.get("/", include_in_schema=False)
    async def inspector() -> Response:
        return inspector_page()

    @app.get("/health", responses=errors(503))
    async def health(request: Request) -> Response:
        health = service.health()
        if not health.ok:
            return error_response(unavailable(health.reason), request.scope)
        return JSONResponse({"status": "degraded", "reason": health.reason} if health.reason else {"status": "ok"})

    @app.get("/ping", responses=errors(503))
    @app.post("/ping", responses=errors(503))
    async def ping(request: Request) -> Response:
        return await health(request)

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.engine.num_pending}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(service.metrics.render(), media_type=metrics.CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        ready = service.engine.ready
        return {
            "version": __version__,
            "model": service.model_id,
            "front": {"role": "front", "pid": os.getpid()},
            "topology": service.topology,
            "num_pages": ready.num_pages if ready else 0,
            "num_state_checkpoints": ready.num_state_checkpoints if ready else 0,
            "sampling_defaults": dict(service.sampling_defaults),
            "draft_heads": service.heads(),
            "config": asdict(service.config),
        }
