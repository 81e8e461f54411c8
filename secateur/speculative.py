"""The speculative configuration: one dictionary with vLLM's keys plus ours."""

from __future__ import annotations

import json
import warnings
from pathlib import Path as FilePath
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from secateur.errors import ConfigError, Problem
from secateur.schema import Strict, did_you_mean, normalise_keys
from secateur.settings import TREE_RULES, WEIGHTS, Acceptance, Probability, SpeculativeSettings, TreePrune
from secateur.token_tree import MAX_NODES, Path, parse_token_tree
from secateur.vllm_names import METHODS, SPECULATIVE_ADVICE

OFF_WITH_THRESHOLDS = "'off' contradicts the thresholds; write 'thresholds' or remove them"
# These settings apply only with draft probabilities.
USES_DRAFT_PROBS = ("draft_sample_method", "rejection_method", "draft_probs_min_temperature")


class SpeculativeConfig(SpeculativeSettings, Strict):
    """The drafting and verification settings of a service; `SpeculativeSettings` has its fields.

    Unset fields hold their resolved value after validation (method inferred, lookup bounds mirrored, tree counted);
    `model_fields_set` still holds the names of the given ones.
    """

    _is_method_given: bool = PrivateAttr(default=True)

    @property
    def is_method_given(self) -> bool:
        """Return whether the method was written, and not inferred."""
        return self._is_method_given

    @property
    def token_tree(self) -> tuple[Path, ...] | None:
        """Return the static tree in breadth-first order, or None."""
        return None if self.speculative_token_tree is None else parse_token_tree(self.speculative_token_tree)

    @model_validator(mode="before")
    @classmethod
    def _infer_method(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = normalise_keys(data)
        if "tensor_parallel_size" in data:
            raise ConfigError(
                "tensor_parallel_size belongs to the target model; for the drafter write draft_tensor_parallel_size"
            )
        if "overlap" in data:  # a key of earlier versions
            raise ConfigError(Problem("overlap", "drafter and target work in turn; remove it"))
        if problems := [
            Problem(key, f"is a key of vLLM that Secateur does not have: {SPECULATIVE_ADVICE[key]}")
            for key in data
            if key in SPECULATIVE_ADVICE
        ]:
            raise ConfigError(*problems)
        method, model = data.get("method"), data.get("model")
        if method is None:
            if model is None:
                raise ConfigError(_no_drafter(data))
            if not isinstance(model, str):
                raise ConfigError(Problem("model", f"must be the drafter's folder or id, a text (got {model!r})"))
            method = infer_method(model)
        elif isinstance(method, str):
            method = _canonical_method(method)
            if method not in WEIGHTS:
                raise ConfigError(Problem("method", _unknown_method(method)))
        data["method"] = method
        if (method == "ngram" and _is_ngram(model)) or (method == "mtp" and _is_mtp(model)):
            del data["model"]
        return data

    @field_validator("speculative_token_tree", mode="before")
    @classmethod
    def _canonical_tree(cls, value: Any) -> Any:
        # A YAML file may hold the list itself: [[0], [1], [0, 0]].
        if isinstance(value, list | tuple):
            value = str([tuple(path) if isinstance(path, list | tuple) else path for path in value])
        return str(list(parse_token_tree(value))) if isinstance(value, str) else value

    @model_validator(mode="wrap")
    @classmethod
    def _remember_who_wrote_the_method(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        own = build(data)
        if isinstance(data, dict):
            own._is_method_given = data.get("method") is not None
        return own

    @model_validator(mode="after")
    def _rules(self) -> Self:
        problems = [*self._model_rule(), *self._tree_rules(), *self._pruning_rules(), *self._lookup_rules()]
        if problems:
            raise ConfigError(*problems)
        self._warn_unused()
        return self

    def _model_rule(self) -> list[Problem]:
        weights = WEIGHTS[self.method]
        if weights == "own" and self.model is None:
            return [Problem("model", f"method {self.method!r} needs a model; give the drafter's folder or id")]
        if weights == "none" and self.model is not None:
            return [Problem("model", f"method {self.method!r} drafts from the prompt and takes no model; remove it")]
        return []

    def _tree_rules(self) -> list[Problem]:
        given = self.model_fields_set
        tree = self.token_tree
        if tree is None:
            if self.speculative_tree == "static":
                return [Problem("speculative_tree", "'static' needs speculative_token_tree, e.g. '[(0,), (1,)]'")]
            return self._chain_rules() if self.speculative_tree == "chain" else []
        problems = []
        if "speculative_tree" in given and self.speculative_tree != "static":
            problems.append(
                Problem(
                    "speculative_tree",
                    f"{self.speculative_tree!r} contradicts speculative_token_tree; write 'static' or remove one",
                )
            )
        if "num_speculative_tokens" in given and self.num_speculative_tokens != len(tree):
            problems.append(
                Problem(
                    "speculative_token_tree",
                    f"has {len(tree)} nodes but num_speculative_tokens={self.num_speculative_tokens}; "
                    f"write num_speculative_tokens={len(tree)} or leave it out",
                )
            )
        self._settle(
            speculative_tree="static",
            num_speculative_tokens=len(tree),
            speculative_tree_max_depth=max(len(path) for path in tree),
            speculative_tree_max_children=max(path[-1] for path in tree) + 1,
        )
        return problems

    def _chain_rules(self) -> list[Problem]:
        """Set the depth and width of a chain; return the problems of settings that contradict them."""
        given, num = self.model_fields_set, self.num_speculative_tokens
        problems = []
        if "speculative_tree_max_depth" in given and self.speculative_tree_max_depth < num:
            depth = self.speculative_tree_max_depth
            problems.append(
                Problem(
                    "speculative_tree_max_depth",
                    f"is {depth}, but a chain of num_speculative_tokens={num} is {num} deep; "
                    f"write num_speculative_tokens={depth} for a chain of {depth}",
                )
            )
        if "speculative_tree_max_children" in given and self.speculative_tree_max_children != 1:
            problems.append(Problem("speculative_tree_max_children", "a chain has one child per node; remove it"))
        self._settle(speculative_tree_max_depth=num, speculative_tree_max_children=1)
        return problems

    def _pruning_rules(self) -> list[Problem]:
        both = self.speculative_tree_prune_threshold
        problems = []
        if both is not None:
            for name in TREE_RULES:
                if name in self.model_fields_set and getattr(self, name) != both:
                    value = getattr(self, name)
                    problems.append(
                        Problem(name, f"{value} contradicts speculative_tree_prune_threshold={both}; keep one")
                    )
            self._settle(**dict.fromkeys(TREE_RULES, both))
        has_threshold = any(getattr(self, name) > 0 for name in TREE_RULES)
        if "speculative_tree_prune" not in self.model_fields_set:
            if has_threshold:
                self._settle(speculative_tree_prune="thresholds")
            elif self.speculative_tree == "static":
                self._settle(speculative_tree_prune="off")
        elif has_threshold and self.speculative_tree_prune == "off":
            problems.append(Problem("speculative_tree_prune", OFF_WITH_THRESHOLDS))
        return problems

    def _lookup_rules(self) -> list[Problem]:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if self.method != "ngram":
            return [
                Problem(name, f"applies to method 'ngram' only, not {self.method!r}; remove it")
                for name in ("prompt_lookup_max", "prompt_lookup_min")
                if name in self.model_fields_set
            ]
        if low is None and high is None:
            low = high = 5
        low, high = (high if low is None else low), (low if high is None else high)
        self._settle(prompt_lookup_min=low, prompt_lookup_max=high)
        if low is not None and high is not None and low > high:
            return [Problem("", f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}")]
        return []

    def _warn_unused(self) -> None:
        if self.acceptance == "coupled":
            names = ["enable_draft_probs", *USES_DRAFT_PROBS]
            why = "with acceptance 'coupled' (drafts follow the target's own noise), but on requests with 'rejection'"
        elif not self.enable_draft_probs:
            names, why = [*USES_DRAFT_PROBS], "with enable_draft_probs=false, but on requests that set it"
        else:
            names, why = [], ""
        if unused := [name for name in names if name in self.model_fields_set]:
            has = "has" if len(unused) == 1 else "have"
            warnings.warn(f"{' and '.join(unused)} {has} no effect {why}", UserWarning, stacklevel=2)


class Speculative(Strict):
    """The `speculative` object of a request; omitted fields follow the service's configuration."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    enabled: bool | None = None
    """Whether to draft for this request."""
    num_speculative_tokens: Annotated[int, Field(gt=0, le=MAX_NODES)] | None = None
    """The most draft nodes per step, at most the service's number."""
    tree_prune: TreePrune | None = None
    """How trees are pruned: by the two thresholds, by a cost model (auto), or not at all (off)."""
    tree_prune_min_prob: Probability | None = None
    """Do not expand a node whose best next token is less probable than this."""
    tree_prune_path_prob: Probability | None = None
    """Do not expand a node whose path from the root is less probable than this."""
    acceptance: Acceptance | None = None
    """The acceptance rule. Both emit the target's distribution."""
    enable_draft_probs: bool | None = None
    """Test drafts against their probabilities; applies to acceptance 'rejection' only."""

    @model_validator(mode="before")
    @classmethod
    def _shorter_than_the_service_s(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            short = str(key).replace("-", "_").removeprefix("speculative_")
            if short in cls.model_fields and str(key).startswith("speculative"):
                raise ConfigError(Problem(str(key), f"is written {short!r} in a request"))
        return data

    @model_validator(mode="after")
    def _rules(self) -> Self:
        thresholds = [getattr(self, name.removeprefix("speculative_")) for name in TREE_RULES]
        if self.tree_prune == "off" and any(thresholds):
            raise ConfigError(Problem("tree_prune", OFF_WITH_THRESHOLDS))
        return self


def infer_method(model: str) -> str:
    """Return the method that a drafter's checkpoint tells, if it is in a folder, or its name implies, as in vLLM.

    'eagle3' is checked first, so that 'eagle-heads/x-eagle3' is an EAGLE-3 head. P-EAGLE heads are, too.
    """
    name = model.lower()
    if _is_ngram(model):
        return "ngram"
    if _is_mtp(name):
        return _canonical_method(model)
    if method := _method_of_folder(FilePath(model)):
        return method
    if any(kind in name for kind in ("eagle3", "p-eagle", "peagle")):
        return "eagle3"
    if kind := next((kind for kind in ("dspark", "dflash") if kind in name), None):
        return kind
    return "eagle" if "eagle-" in name else "draft_model"


def _method_of_folder(folder: FilePath) -> str | None:
    """Return the method that the files in a folder tell, None if they do not; they are checked later."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        own = raw | (raw.get("dflash_config") or {})
        names = " ".join([*(raw.get("architectures") or ()), raw.get("speculators_model_type") or ""]).lower()
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if "dflash_config" in raw or "dspark" in names or "dflash" in names:
        return "dspark" if own.get("markov_rank") else "dflash"
    if "draft_vocab_size" in raw or "eagle3" in names or raw.get("speculators_model_type"):
        return "eagle3"
    if (tensors := _tensor_names(folder / "model.safetensors")) is not None:
        return "eagle" if "fc.weight" in tensors else "draft_model"
    layers = raw.get("num_hidden_layers") or 0  # no model has one alone
    return "draft_model" if layers > 1 else "eagle" if layers == 1 else None


def _tensor_names(file: FilePath) -> set[str] | None:
    """Return the names in the header of a safetensors file, None without such a file."""
    try:
        with file.open("rb") as stream:
            return set(json.loads(stream.read(int.from_bytes(stream.read(8), "little"))))
    except (OSError, ValueError, MemoryError, OverflowError):
        return None


def _canonical_method(method: str) -> str:
    if _is_ngram(method):
        return "ngram"
    if method.endswith("_mtp"):
        warnings.warn(f"method {method!r} is deprecated; write 'mtp'", DeprecationWarning, stacklevel=2)
        return "mtp"
    return method


def _unknown_method(method: str) -> str:
    """Return what to write instead of a method that there is not, many of which vLLM has."""
    if method in METHODS:
        return f"{method!r} is a method of vLLM that Secateur does not have: {METHODS[method]}"
    return f"there is no method {method!r}{did_you_mean(method, WEIGHTS)}"


def _is_ngram(name: object) -> bool:
    return name in ("ngram", "[ngram]")


def _is_mtp(name: object) -> bool:
    return isinstance(name, str) and (name.lower() == "mtp" or name.lower().endswith("_mtp"))


def _no_drafter(data: dict[str, Any]) -> str:
    instead = "Give 'model' (the drafter's folder or id), or 'method': 'ngram' or 'mtp'"
    if not data:
        return f"has no keys. {instead}"
    given = "num_speculative_tokens" if "num_speculative_tokens" in data else next(iter(data))
    return f"{given} was provided but without speculative model. {instead}"
