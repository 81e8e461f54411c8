"""The API keys that a service accepts now."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from secateur.api_keys import read_api_keys
from secateur.errors import ConfigError

logger = logging.getLogger(__name__)

ApiKeys = Callable[[], Sequence[str]]
"""The keys that are valid at the moment of the call."""


class KeyFile:
    """The keys of a file as it is now; called once a request, for some 20 us.

    Compared by what it holds: by time and size a change within the same moment would be missed. A file that holds no
    key lets nobody in. One that cannot be read says nothing: the keys read last are kept, and the log tells.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._keys = read_api_keys(path)
        self._told = ""

    def __call__(self) -> Sequence[str]:
        """Return the file's keys; the ones read last if it cannot be read."""
        try:
            keys = read_api_keys(self._path)
        except ConfigError as error:
            self._tell(f"{error}; the keys read last are kept")
            return self._keys
        if keys != self._keys:
            logger.info("%d API keys are valid from now on, as %s says", len(keys), self._path)
        self._keys, self._told = keys, ""
        return keys

    def _tell(self, problem: str) -> None:
        """Once, not with every request."""
        if problem != self._told:
            logger.error("%s", problem)
            self._told = problem


def is_authorised(header: bytes, keys: Sequence[str]) -> bool:
    """Whether an Authorization header's value is `Bearer KEY`, the scheme in any case (RFC 9110)."""
    scheme, _, given = header.partition(b" ")
    # Every key is compared, and each in constant time: how long it takes tells nothing about any.
    matches = [hmac.compare_digest(given.strip(), key.strip().encode()) for key in keys]
    return scheme.lower() == b"bearer" and any(matches)
