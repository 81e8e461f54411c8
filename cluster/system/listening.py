"""The service's listening socket and its URL. Imports nothing large, so that a port in use is reported at once."""

from __future__ import annotations

import socket

from secateur.errors import ConfigError


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the port is in use or the host is invalid."""
    listening_socket(host, port).close()


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a port in use is reported before an engine starts. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        message = f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        raise ConfigError(message) from error
    return sock


def listening_sockets(host: str, port: int, num: int) -> list[socket.socket]:
    """Return that many bound sockets of one port, among which the kernel divides connections. Raises ConfigError."""
    with listening_socket(host, port) as first:  # it alone notices that others have the port
        address = first.getsockname()
    found = []
    for _ in range(num):
        found.append(socket.socket(first.family, socket.SOCK_STREAM))
        found[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found[-1].bind(address)
    return found


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of a service that listens on `host`; for a wildcard address, the loopback URL."""
    scheme = "https" if tls else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
