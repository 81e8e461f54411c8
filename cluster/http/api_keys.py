"""The API keys that a service accepts, from its configuration or from a file that may change."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from secateur.api_keys import read_api_keys
from secateur.errors import ConfigError

logger = logging.getLogger(__name__)

ApiKeys = Callable[[], Sequence[str]]
"""Returns the keys that are valid at the moment of the call."""


class KeyFile:
    """Reads the keys from a file at every request, in about 20 us.

    It rereads the file because its time and size do not show every change. An empty file rejects every request. If the
    file cannot be read, the last keys stay valid and the problem is logged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._keys = read_api_keys(path)
        self._logged_problem = ""

    def __call__(self) -> Sequence[str]:
        """Return the file's keys; the ones read last if it cannot be read."""
        try:
            keys = read_api_keys(self._path)
        except ConfigError as error:
            if (problem := str(error)) != self._logged_problem:  # log it once, not at every request
                logger.error("%s; the keys read last are kept", problem)
                self._logged_problem = problem
            return self._keys
        if keys != self._keys:
            logger.info("%s changed: %d API keys are valid now", self._path, len(keys))
        self._keys, self._logged_problem = keys, ""
        return keys


def is_authorised(header: bytes, keys: Sequence[str]) -> bool:
    """Return whether an Authorization header is `Bearer KEY` with a valid key, its scheme in any case (RFC 9110)."""
    scheme, _, given = header.partition(b" ")
    # Compare every key, each in constant time, so that the duration reveals nothing about the keys.
    matches = [hmac.compare_digest(given.strip(), key.strip().encode()) for key in keys]
    return scheme.lower() == b"bearer" and any(matches)


def owner_of(header: str) -> str:
    """Return what identifies the key of an authorised header, and does not reveal it: files and batches are its own."""
    return sha256(header.partition(" ")[2].strip().encode("latin-1", "replace")).hexdigest()
