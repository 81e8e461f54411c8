"""A headless Chromium over the DevTools protocol: open a page, evaluate expressions, note every request it makes."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_path() -> str | None:
    """Return the browser's path, or None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Connection:
    """Commands to the browser, or to one of its tabs."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        """Take an event."""


class Page(Connection):
    """One tab. `requests` has the URL of every request, `problems` what the console calls an error."""

    def __init__(self, socket: Any) -> None:
        super().__init__(socket)
        self.requests: list[str] = []
        self.problems: list[str] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])

    def open(self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url="about:blank")  # another fragment alone would not load the page again
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=False)["data"]))


class Browser(Connection):
    """A running browser."""

    def __init__(self, socket: Any, port: str) -> None:
        super().__init__(socket)
        self._port = port

    @contextmanager
    def page(self) -> Iterator[Page]:
        """Yield a tab that shares nothing with others, as if the browser had just started."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        with connect(f"ws://127.0.0.1:{self._port}/devtools/page/{target}", max_size=None) as socket:
            yield Page(socket)
        self.call("Target.disposeBrowserContext", browserContextId=context)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """Start the browser."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        process = subprocess.Popen(
            [path, *options, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file, deadline = Path(folder, "DevToolsActivePort"), time.monotonic() + 60
            while not (port_file.exists() and "\n" in port_file.read_text()):
                assert process.poll() is None and time.monotonic() < deadline, "Chromium did not start"
                time.sleep(0.05)
            port, browser = port_file.read_text().split()[:2]
            with connect(f"ws://127.0.0.1:{port}{browser}", max_size=None) as socket:
                yield Browser(socket, port)
        finally:
            process.terminate()
            process.wait(20)
