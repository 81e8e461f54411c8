"""A local server with the Hugging Face hub's API, as huggingface_hub uses it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class FakeHub(ThreadingHTTPServer):
    """Every `root/organisation/model` is a repository with one commit. `fetched` lists downloaded files in order.

    Any revision is that commit; `revisions` holds those that were asked for. `peeked` lists files whose beginning was
    asked for, `resumed` those whose rest was, with its first byte. A file in `cuts` breaks off once, after so many
    bytes; a file in `lost` always does, at once.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.root = root
        self.fetched: list[str] = []
        self.peeked: list[str] = []
        self.revisions: set[str] = set()
        self.resumed: list[tuple[str, int]] = []
        self.cuts: dict[str, int] = {}
        self.lost: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", "models", organisation, model, *_]:
                folder = self.server.root / organisation / model
                if "revision" in parts:
                    self.server.revisions.add(f"{organisation}/{model}:{parts[-1]}")
                files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
                if "tree" in parts:
                    found: object = [
                        {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "0" * 40}
                        for name in files
                    ]
                else:
                    found = {"id": f"{organisation}/{model}", "modelId": f"{organisation}/{model}", "sha": COMMIT}
                    found |= {"siblings": [{"rfilename": name} for name in files], "private": False, "tags": []}
                self._send(200 if files else 404, json.dumps(found).encode())
            case [_, _, "resolve", _, *name] if (path := self._path(parts)).is_file():
                body, asked = path.read_bytes(), self.headers.get("Range")
                start, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
                body = body[int(start) : int(end) + 1 if end else None]
                cut = self._note(f"{parts[0]}/{parts[1]}:{'/'.join(name)}", int(start), end)
                self._send(206 if asked else 200, body, cut)
            case _:
                self._send(404, b"{}")

    do_HEAD = do_GET

    def _path(self, parts: list[str]) -> Path:
        organisation, model, _, _, *name = parts
        return self.server.root.joinpath(organisation, model, *name)

    def _note(self, name: str, start: int, end: str) -> int | None:
        """Note what was asked for; return where the answer breaks off, None = nowhere."""
        hub = self.server
        if self.command != "GET":
            return None
        if start:
            hub.resumed.append((name, start))
        else:
            (hub.peeked if end else hub.fetched).append(name)
        return 0 if name in hub.lost else None if end else hub.cuts.pop(name, None)

    def _send(self, status: int, body: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if "/api/" in self.path else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        self.close_connection |= cut is not None

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_hub(root: Path) -> Iterator[FakeHub]:
    hub = FakeHub(root)
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
