"""Paths: which need admission, and middleware that lets a request reach its route.

That is behind a proxy's prefix, with a trailing slash, or as HEAD.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

ADMITTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
)
"""Paths of requests that need the engine or the tokenizer workers."""


def path_of(scope: Scope) -> str:
    """Return the path below the service's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


@dataclass(frozen=True, slots=True)
class PathMiddleware:
    """Gives the router the path that a route has.

    - `root_path` is the prefix under which clients see the service. It replaces the server's own, and the proxy in
      front may remove it or not.
    - Trailing slashes are removed. A redirect would lose the body with some clients.
    - HEAD becomes GET. The server sends no body, because its own copy of the scope still says HEAD.
    """

    app: ASGIApp
    root_path: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            server_root = scope.get("root_path", "").rstrip("/")
            root, path = self.root_path or server_root, scope["path"]
            for prefix in (server_root, self.root_path):
                rest = path.removeprefix(prefix)
                path = rest if not rest or rest.startswith("/") else path  # a prefix ends where a part of the path ends
            if path:  # else the prefix alone: the router redirects to the prefix with a slash, as relative links need
                path = path.rstrip("/") or "/"
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "root_path": root, "path": root + path, "method": method}
        await self.app(scope, receive, send)
