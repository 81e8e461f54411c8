"""The errors that the client, the batch runner and the configuration raise.

SecateurError
├── ConfigError (also a ValueError)       the configuration is wrong; `problems` holds one entry per field
│   └── MissingModelError                 a model is not on this machine, or cannot be read with what is installed
├── APIError                              the server answered with an error: status, code, param, type, body
│   ├── BadRequestError                   400, 409, 413, 422, 431: the request itself is wrong
│   ├── AuthenticationError               401, 403: the API key is missing or wrong
│   ├── NotFoundError                     404: no such model or path
│   ├── RateLimitError                    429: too many requests; `retry_after` seconds, if the server said
│   ├── ServiceUnavailableError           503: starting, draining or full; `retry_after` likewise
│   └── ServerError                       any other 5xx
├── APIConnectionError (also a ConnectionError)   no answer, or the answer broke off
│   └── APITimeoutError (also a TimeoutError)     no answer in time
└── BatchError                            a batch file cannot be run; `problems` holds one entry per line
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One problem of a configuration. `field` is a dotted path, '' if the message needs none."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class SecateurError(Exception):
    """Base of all errors in this module."""


class ConfigError(SecateurError, ValueError):
    """A wrong configuration; its text has one line per problem, each saying what to write instead."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem("", p) for p in problems)
        super().__init__("\n".join(str(p) for p in self.problems))

    def under(self, field: str) -> ConfigError:
        """Return the same problems with `field` prefixed to their paths."""
        return ConfigError(*(Problem(".".join(filter(None, (field, p.field))), p.message) for p in self.problems))


class MissingModelError(ConfigError):
    """A model is not on this machine, or cannot be read with the packages that are installed."""


class APIError(SecateurError):
    """An error response in OpenAI's format. `body` is the decoded JSON, or the text if it is not JSON."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | int | None = None,
        param: str | None = None,
        type: str | None = None,
        body: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.type = type
        self.body = body


class BadRequestError(APIError):
    """The request is wrong and will stay wrong: do not retry."""


class AuthenticationError(APIError):
    """The API key is missing, wrong, or not allowed to do this."""


class NotFoundError(APIError):
    """No such model or path."""


class RateLimitError(APIError):
    """Too many requests at once."""

    def __init__(self, message: str, *, retry_after: float | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.retry_after = retry_after


class ServiceUnavailableError(APIError):
    """The service is starting, draining or full."""

    def __init__(self, message: str, *, retry_after: float | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.retry_after = retry_after


class ServerError(APIError):
    """The service failed; the request may be valid."""


class APIConnectionError(SecateurError, ConnectionError):
    """The service could not be reached, or the connection broke before the answer was complete."""


class APITimeoutError(APIConnectionError, TimeoutError):
    """The service did not answer in time."""


class BatchError(SecateurError):
    """A batch file that cannot be run as it is; nothing was sent."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([message, *(f"  {p}" for p in problems)]))
