"""The inspector: one page, `inspector.html`, to see the trees of requests. It holds no data and needs no API key.

The page's content security policy allows its own script and style by their digests, and connections to its own host.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi.responses import Response

_PAGE = Path(__file__).with_name("inspector.html")


def inspector_page() -> Response:
    """Return the page."""
    html, headers = _page_and_headers()
    return Response(html, media_type="text/html", headers=headers)


@cache
def _page_and_headers() -> tuple[str, dict[str, str]]:
    html = _PAGE.read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        f"style-src {_digest(html, 'style')}",
        f"script-src {_digest(html, 'script')}",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return html, {
        "Content-Security-Policy": "; ".join(policy),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }


def _digest(html: str, tag: str) -> str:
    """Return the source expression of the page's only element of that name."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
