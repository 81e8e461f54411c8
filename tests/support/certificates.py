"""Self-signed certificates, made by openssl, and the check that a service speaks TLS with one."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest


class Pair(NamedTuple):
    certificate: Path
    key: Path

    @property
    def flags(self) -> list[str]:
        return ["--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key)]


def self_signed(folder: Path, name: str = "own", *options: str) -> Pair:
    """Write a certificate for localhost and 127.0.0.1, and its key."""
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1", *(options or ["-nodes"]), *subject]
    subprocess.run([*made, "-keyout", str(pair.key), "-out", str(pair.certificate)], check=True, capture_output=True)
    return pair


def assert_speaks_tls_alone(url: str, pair: Pair) -> None:
    """Check that HTTPS answers those who trust the certificate, and that neither others nor plain HTTP get anything."""
    assert url.startswith("https://")
    body = {"prompt": "def f(", "max_tokens": 4}
    with httpx2.Client(
        base_url=url, verify=ssl.create_default_context(cafile=pair.certificate), timeout=60
    ) as trusting:
        assert trusting.get("/health").json() == {"status": "ok"}
        assert trusting.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
        with trusting.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert [line for line in response.iter_lines() if line.startswith("data:")][-1] == "data: [DONE]"
        too_large = trusting.get("/health", headers={"X-Large": "x" * (1 << 17)})
        assert too_large.status_code == 431, "the limits hold inside TLS"
    with pytest.raises(httpx2.ConnectError, match=r"(?i)certificate"):
        httpx2.get(f"{url}/health", timeout=10)
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(f"{url.replace('https', 'http')}/health", timeout=10)
