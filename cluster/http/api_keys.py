"""The API keys that a service accepts, from its configuration or from a file that may change."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from secateur.api_keys import FIELD, ApiKey, parse_api_keys
from secateur.config import read_text
from secateur.errors import ConfigError

logger = logging.getLogger(__name__)

ApiKeys = Callable[[], tuple[ApiKey, ...]]
"""Returns the keys that are valid at the moment of the call; the same tuple as long as they do not change."""


class KeyFile:
    """Reads the keys from a file at every request, in about 20 us.

    It rereads the file because its time and size do not show every change. An empty file rejects every request. If the
    file cannot be read or a line is wrong, the last keys stay valid and the problem is logged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._text = read_text(path, FIELD)
        self._keys = parse_api_keys(self._text, path)
        self._logged_problem = ""

    def __call__(self) -> tuple[ApiKey, ...]:
        """Return the file's keys; the ones read last if it cannot be read."""
        try:
            if (text := read_text(self._path, FIELD)) != self._text:
                keys = parse_api_keys(text, self._path)
                logger.info("%s changed: %d API keys are valid now", self._path, len(keys))
                self._text, self._keys = text, keys
        except ConfigError as error:
            if (problem := str(error)) != self._logged_problem:  # log it once, not at every request
                logger.error("%s; the keys read last are kept", problem)
                self._logged_problem = problem
        else:
            self._logged_problem = ""
        return self._keys


def matching_key(header: bytes, keys: tuple[ApiKey, ...]) -> ApiKey | None:
    """Return the key of a header `Bearer KEY`, None if it is wrong. The scheme may have any case (RFC 9110)."""
    scheme, _, given = header.partition(b" ")
    # Compare every key, each in constant time, so that the duration reveals nothing about the keys.
    matches = [hmac.compare_digest(given.strip(), key.key.strip().encode()) for key in keys]
    if scheme.lower() != b"bearer":
        return None
    return next((key for key, is_match in zip(keys, matches, strict=True) if is_match), None)


def owner_of(key: ApiKey) -> str:
    """Return what identifies a key in all that is stored for it, and does not reveal it.

    It is not the key's name: that labels metrics, and keys of several clients may share it.
    """
    return sha256(key.key.strip().encode()).hexdigest()
