"""Secateur's public API: client, batch runner, OpenAI models, configuration and errors.

    from secateur import Client
    print(Client().complete("def main(", max_tokens=32).text)

Names are imported on first use, so that `import secateur` costs nothing. Nothing here imports torch or ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from secateur.batch import run_batch, run_batch_async
    from secateur.batch_progress import BatchSummary
    from secateur.client import AsyncClient, Client
    from secateur.config import AppArgs, EngineArgs
    from secateur.errors import (
        APIConnectionError,
        APIError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BatchError,
        ConfigError,
        NotFoundError,
        RateLimitError,
        SecateurError,
        ServerError,
        ServiceUnavailableError,
    )
    from secateur.offline import LLM, SamplingParams
    from secateur.outputs import CompletionOutput, RequestOutput
    from secateur.requests import ChatCompletionRequest, CompletionRequest
    from secateur.responses import (
        ChatCompletionChunk,
        ChatCompletionResponse,
        CompletionChunk,
        CompletionResponse,
        SpeculativeStats,
        Usage,
    )
    from secateur.speculative import Speculative, SpeculativeConfig

_HOMES = {
    "batch": ("run_batch", "run_batch_async"),
    "batch_progress": ("BatchSummary",),
    "client": ("AsyncClient", "Client"),
    "config": ("AppArgs", "EngineArgs"),
    "errors": (
        "APIConnectionError",
        "APIError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "BatchError",
        "ConfigError",
        "NotFoundError",
        "RateLimitError",
        "SecateurError",
        "ServerError",
        "ServiceUnavailableError",
    ),
    "offline": ("LLM", "SamplingParams"),
    "outputs": ("CompletionOutput", "RequestOutput"),
    "requests": ("ChatCompletionRequest", "CompletionRequest"),
    "responses": (
        "ChatCompletionChunk",
        "ChatCompletionResponse",
        "CompletionChunk",
        "CompletionResponse",
        "SpeculativeStats",
        "Usage",
    ),
    "speculative": ("Speculative", "SpeculativeConfig"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # resolved by __getattr__
    "LLM",
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AppArgs",
    "AsyncClient",
    "AuthenticationError",
    "BadRequestError",
    "BatchError",
    "BatchSummary",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "Client",
    "CompletionChunk",
    "CompletionOutput",
    "CompletionRequest",
    "CompletionResponse",
    "ConfigError",
    "EngineArgs",
    "NotFoundError",
    "RateLimitError",
    "RequestOutput",
    "SamplingParams",
    "SecateurError",
    "ServerError",
    "ServiceUnavailableError",
    "Speculative",
    "SpeculativeConfig",
    "SpeculativeStats",
    "Usage",
    "__version__",
    "run_batch",
    "run_batch_async",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from secateur.install import installed_version

        return installed_version()
    if name not in _HOME_OF:
        raise AttributeError(f"module 'secateur' has no attribute {name!r}")
    return getattr(import_module(f"secateur.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
