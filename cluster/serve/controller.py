"""Asks Serve's controller about the application, and deletes it.

The controller is the actor that holds Serve's state. It is called directly: Serve's own client starts another Ray if
the one it used has ended.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.context import _get_global_client

logger = logging.getLogger(__name__)

APP_NAME = "secateur"
DELETE_TIMEOUT_S = 10.0
"""How long Serve may take to end the application once running answers have ended."""
STATUS_TIMEOUT_S = 30.0


def get_controller() -> Any:
    """Return the actor handle of Serve's controller."""
    return _get_global_client()._controller


def applications(controller: Any) -> dict[str, dict[str, Any]]:
    """Return Serve's status of each application. Raises RayError."""
    details: dict[str, Any] = ray.get(controller.get_serve_instance_details.remote(), timeout=STATUS_TIMEOUT_S)
    return details["applications"]


def loss_reason(controller: Any) -> str | None:
    """Return why Serve will not restart the application; None if it may, or if the controller does not reply."""
    try:
        application = applications(controller).get(APP_NAME)
    except (ray.exceptions.RayError, TimeoutError):  # the controller may be restarting
        return None
    if application is None:
        return "its application was deleted"
    return f"its application failed, {application['message']}" if application["status"] == "DEPLOY_FAILED" else None


def start_failure() -> str:
    """Return why the deployment failed: the last exception in the constructor's traceback that Serve kept."""
    application = ray_serve.status().applications.get(APP_NAME)
    texts = [deployment.message for deployment in application.deployments.values()] if application else []
    lines = [line.strip() for text in texts for line in text.splitlines()]
    found = [line for line in lines if re.match(r"[\w.]*(Error|EngineDead|Exception)\b.*: ", line)]
    return found[-1] if found else "\n".join(texts)


def delete_application(controller: Any, drain_s: float) -> None:
    """Delete the application and wait until it is gone, at most `drain_s` and DELETE_TIMEOUT_S.

    Runs in a thread, because a call to a dead Ray never returns.
    """
    timeout_s = drain_s + DELETE_TIMEOUT_S
    given_up = threading.Event()
    thread = threading.Thread(target=_wait_deleted, args=(controller, given_up), name="serve-delete", daemon=True)
    thread.start()
    thread.join(timeout_s)
    given_up.set()
    if thread.is_alive():
        logger.warning("Serve has not ended the application within %.0f s", timeout_s)


def _wait_deleted(controller: Any, given_up: threading.Event) -> None:
    try:
        ray.get(controller.delete_apps.remote([APP_NAME]), timeout=STATUS_TIMEOUT_S)
        while not given_up.wait(0.2) and APP_NAME in applications(controller):
            pass
    except Exception:
        logger.warning("Serve could not end the application", exc_info=True)
