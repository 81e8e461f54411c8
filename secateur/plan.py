"""The request of `secateur plan` and the files it reads, validated before anything is loaded.

A `CostTable` holds step times, an `AcceptanceTable` accepted tokens, and `Hardware` published figures of a device for
predictions without measurements. All are JSON; `cluster.planner` computes with them.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from secateur.config import read_text
from secateur.errors import ConfigError, Problem
from secateur.jsonl import lines_of, value_of
from secateur.schema import Strict, did_you_mean
from secateur.token_tree import MAX_NODES

Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
Nodes = Annotated[int, Field(ge=0, le=MAX_NODES)]
"""Draft nodes of one tree, without its root; 0 = no speculation."""


class _File(Strict):
    """A model read from a JSON file; arrays become tuples."""

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        return {key: _frozen(value) for key, value in data.items()} if isinstance(data, dict) else data


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# -- step times -----------------------------------------------------------------------------------------------


class VerifyCostTable(_File):
    """The target's part of a step, in milliseconds: packing inputs, the forward over all rows, sampling, verification.

        table(rows) + request_ms * requests + kv_token_ms * kv + row_kv_token_ms * pairs
        + tree_request_ms * trees + (tree_ms if trees > 0)

    kv: cached tokens of all requests. pairs: the same, weighted by each request's rows, which is what attention
    computes. trees: requests with a tree. The table is interpolated linearly, never falls, and is extrapolated with the
    slope of its second half.
    """

    rows: tuple[Positive, ...]
    ms: tuple[NotNegative, ...]
    request_ms: NotNegative = 0.0
    kv_token_ms: NotNegative = 0.0
    row_kv_token_ms: NotNegative = 0.0
    tree_ms: NotNegative = 0.0
    """Extra time of a step with trees, all else equal: it waits for the drafter."""
    tree_request_ms: NotNegative = 0.0
    """Extra time per request with a tree: packing and verifying it."""

    @model_validator(mode="after")
    def _is_table(self) -> Self:
        _check_axis("rows", self.rows)
        if len(self.ms) != len(self.rows):
            raise ConfigError(Problem("ms", f"has {len(self.ms)} entries, rows has {len(self.rows)}"))
        if any(late < early for early, late in zip(self.ms, self.ms[1:], strict=False)):
            raise ConfigError(Problem("ms", "may never fall: more rows cannot take less time"))
        return self


class DraftCostTable(_File):
    """The drafter's part of a step, in milliseconds, by requests (rows) and nodes per tree (columns).

    Interpolated linearly in requests and in log(1 + nodes).
    """

    requests: tuple[PositiveInt, ...]
    nodes: tuple[Annotated[int, Field(ge=1, le=MAX_NODES)], ...]
    ms: tuple[tuple[NotNegative, ...], ...]
    """Drafting time, measured by the drafter."""
    transfer_ms: tuple[tuple[NotNegative, ...], ...]
    """Time to send the request and receive the trees, beyond drafting."""
    kv_token_ms: tuple[NotNegative, ...] | None = None
    """Growing a tree, per cached token of its request; one entry for each of `nodes`."""
    prompt_token_ms: NotNegative = 0.0
    """Prefill per prompt token."""
    host_ms: NotNegative = 0.0
    """Extra host time of a step with drafts."""

    @model_validator(mode="after")
    def _is_grid(self) -> Self:
        _check_axis("requests", self.requests)
        _check_axis("nodes", self.nodes)
        for name, grid in (("ms", self.ms), ("transfer_ms", self.transfer_ms)):
            if len(grid) != len(self.requests) or any(len(line) != len(self.nodes) for line in grid):
                raise ConfigError(Problem(name, f"must be {len(self.requests)} lines of {len(self.nodes)}: see above"))
        if self.kv_token_ms is not None and len(self.kv_token_ms) != len(self.nodes):
            raise ConfigError(Problem("kv_token_ms", f"must have {len(self.nodes)} entries, one for each of nodes"))
        return self


class AcceptancePoint(_File):
    """Draft tokens accepted per drafted step, without the bonus token."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    accepted: NotNegative
    temperature: NotNegative = 0.0
    context: NotNegative | None = None
    """Cached tokens of a request; None = any."""
    tree: str | None = None
    acceptance: str | None = None
    """The tree and the acceptance rule of the measurement; None = any."""


class AcceptanceTable(_File):
    """Accepted tokens by tree: either measured points, or acceptance probabilities by rank.

    probabilities[d][k]: probability that the child of rank k of an accepted node at depth d is accepted.
    """

    points: tuple[AcceptancePoint, ...] = ()
    probabilities: tuple[tuple[Probability, ...], ...] = ()

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if bool(self.points) == bool(self.probabilities):
            raise ConfigError("give either points or probabilities")
        if any(not ranks for ranks in self.probabilities):
            raise ConfigError(Problem("probabilities", "each depth needs at least one child"))
        return self


class CostTable(_File):
    """Step times, and the measured acceptance if there is one."""

    source: Literal["measured", "predicted", "given"] = "given"
    hardware: str = ""
    model: str = ""
    drafter: str = ""
    temperature: NotNegative = 0.0
    verify: VerifyCostTable
    draft: DraftCostTable | None = None
    host_ms: NotNegative = 0.0
    """Host time in and between steps: scheduling, bookkeeping, sending tokens to the HTTP server."""
    host_request_ms: NotNegative = 0.0
    """Host time per request."""
    acceptance: AcceptanceTable | None = None
    fit_error: NotNegative | None = None
    """Median relative error of the fit, for measured tables."""


def _check_axis(name: str, values: tuple[float, ...]) -> None:
    if not values or any(late <= early for early, late in itertools.pairwise(values)):
        raise ConfigError(Problem(name, "must have at least one entry and rise from each to the next"))


# -- hardware --------------------------------------------------------------------------------------------


class Hardware(_File):
    """One device and its links, for predictions without measurements."""

    name: str = "given"
    memory_gb: Positive
    bandwidth_gbs: Positive
    """Memory bandwidth, GB/s."""
    tflops: Positive
    """Dense matrix multiplication in the model's dtype, TFLOP/s."""
    link_gbs: Positive
    """Bandwidth to other devices, one way, GB/s."""
    link_latency_us: NotNegative = 15.0
    """Latency of a small all-reduce (assumed)."""
    bandwidth_share: Probability = 0.8
    flops_share: Probability = 0.6
    """Shares of the published figures that real kernels reach (assumed)."""
    layer_us: NotNegative = 8.0
    """Time of a transformer layer beyond its matrices: launches, norms, copies (assumed)."""
    host_ms: NotNegative = 1.0
    host_request_ms: NotNegative = 0.02
    transfer_ms: NotNegative = 0.15
    """Host time per step, per request, and the transfer to and from the drafter (assumed)."""


HARDWARE = {
    # NVIDIA's data sheets: A100 80GB SXM; L4; L40S; H100 SXM; H200 SXM; HGX B200 (per GPU). Dense bfloat16, half of
    # what is printed "with sparsity"; NVLink and PCIe one way, half of what is printed "bidirectional".
    "a100": Hardware(name="a100", memory_gb=80, bandwidth_gbs=2039, tflops=312, link_gbs=300),
    "l4": Hardware(name="l4", memory_gb=24, bandwidth_gbs=300, tflops=121, link_gbs=32),
    "l40s": Hardware(name="l40s", memory_gb=48, bandwidth_gbs=864, tflops=362, link_gbs=32),
    "h100": Hardware(name="h100", memory_gb=80, bandwidth_gbs=3350, tflops=989, link_gbs=450),
    "h200": Hardware(name="h200", memory_gb=141, bandwidth_gbs=4800, tflops=989, link_gbs=450),
    "b200": Hardware(name="b200", memory_gb=180, bandwidth_gbs=7700, tflops=2250, link_gbs=900),
}


# -- requests ---------------------------------------------------------------------------------------------------


class LengthDistribution(Strict):
    """A distribution of token counts: constant `low`, uniform from `low` to `high`, or exponential with mean `low`."""

    low: PositiveInt
    high: PositiveInt | None = None
    is_exponential: bool = False

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Parse "512", "64-512" or "exp:512". Raises ValueError."""
        head, colon, mean = text.rpartition(":")
        low, dash, high = mean.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or head not in ("", "exp") or (colon and dash):
            raise ValueError(f"write 512, 64-512 or exp:512 tokens (got {text!r})")
        if int(low) < 1 or (dash and int(high) < int(low)):
            raise ValueError(f"must be at least 1, and the second number not less than the first (got {text!r})")
        return cls(low=int(low), high=int(high) if dash else None, is_exponential=head == "exp")


class Arrival(_File):
    """One line of a trace."""

    seconds: NotNegative
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt


class PlanRequest(Strict):
    """What to predict; without costs, hardware or profile, only the topology is shown."""

    costs: CostTable | None = None
    hardware: Hardware | None = None
    profile: bool = False
    costs_output: Path | None = None
    acceptance: AcceptanceTable | None = None
    batches: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Batch sizes: requests that decode together."""
    context: PositiveInt = 512
    """Cached tokens per request."""
    temperature: NotNegative = 0.0
    nodes: Nodes | None = None
    """Draft nodes of every tree; None = the best for each batch."""
    replicas: PositiveInt | None = None
    request_rate: Positive | None = None
    """Requests per second to all replicas, as a Poisson process."""
    num_requests: PositiveInt = 10_000
    prompt_tokens: LengthDistribution = LengthDistribution(low=512)
    output_tokens: LengthDistribution = LengthDistribution(low=128)
    trace: tuple[Arrival, ...] = ()
    """Replaces rate and lengths."""

    @field_validator("prompt_tokens", "output_tokens", mode="before")
    @classmethod
    def _lengths(cls, value: Any) -> Any:
        return LengthDistribution.parse(value) if isinstance(value, str) else value

    @field_validator("batches")
    @classmethod
    def _rising(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(values)))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        sources = {"--costs": self.costs, "--hardware": self.hardware, "--profile": self.profile or None}
        given = [name for name, value in sources.items() if value is not None]
        problems = []
        if len(given) > 1:
            problems.append(Problem(" and ".join(given), "each give the time of a step; keep one"))
        if self.costs_output is not None and not self.profile:
            problems.append(Problem("--costs-output", "needs --profile, which measures the costs"))
        if self.costs_output is not None and not self.costs_output.absolute().parent.is_dir():
            problems.append(Problem("--costs-output", f"there is no folder {self.costs_output.parent}"))
        simulated = [f"--{name.replace('_', '-')}" for name in _SIMULATED if name in self.model_fields_set]
        if self.is_simulated and self.trace and (more := [name for name in simulated if name not in _BESIDE_TRACE]):
            problems.append(Problem(", ".join(more), "come from the --trace; keep one"))
        if simulated and not self.is_simulated:
            problems.append(Problem(simulated[0], "describes a fleet under load: add --request-rate or --trace"))
        predicted = [f"--{_SPELT.get(name, name)}" for name in _PREDICTED if name in self.model_fields_set]
        if not given and (unpriced := predicted + simulated):
            problems.append(Problem(unpriced[0], "predicts from costs: add --costs FILE, --profile or --hardware NAME"))
        if problems:
            raise ConfigError(*problems)
        return self

    @property
    def predicts(self) -> bool:
        """Return whether there are costs to predict from."""
        return self.costs is not None or self.hardware is not None or self.profile

    @property
    def is_simulated(self) -> bool:
        """Return whether to simulate a fleet under load."""
        return self.request_rate is not None or bool(self.trace)


_SIMULATED = ("replicas", "request_rate", "num_requests", "prompt_tokens", "output_tokens", "trace")
_BESIDE_TRACE = ("--replicas", "--trace")
_PREDICTED = ("acceptance", "batches", "context", "temperature", "nodes")
_SPELT = {"batches": "batch"}


# -- files -----------------------------------------------------------------------------------------------------------


def read_costs(path: Path) -> CostTable:
    """Read a cost table. Raises ConfigError with the file and every problem in it."""
    return _load(CostTable, _read_json(path, "--costs"), f"--costs {path}")


def read_hardware(name: str) -> Hardware:
    """Return a known device by name, or read a JSON file."""
    if name.lower() in HARDWARE:
        return HARDWARE[name.lower()]
    if not (name.endswith(".json") or "/" in name):
        near = did_you_mean(name, HARDWARE)
        raise ConfigError(Problem("--hardware", f"{name!r} is not known{near}; or write the name of a .json file"))
    return _load(Hardware, _read_json(Path(name), "--hardware"), f"--hardware {name}")


def read_acceptance(path: Path) -> AcceptanceTable:
    """Read an AcceptanceTable, or the unpruned rows that `secateur bench acceptance` writes."""
    raw = _read_json(path, "--acceptance")
    if isinstance(raw, list):
        try:
            raw = {"points": [_point(row) for row in raw if row["prune"] == "off"]}
        except (KeyError, TypeError) as error:
            message = f"not rows of `secateur bench acceptance`: {error!r}"
            raise ConfigError(Problem(f"--acceptance {path}", message)) from None
    return _load(AcceptanceTable, raw, f"--acceptance {path}")


def _point(row: dict[str, Any]) -> dict[str, Any]:
    names = ("temperature", "tree", "acceptance")
    accepted = row["acceptance_length"] - 1
    return {"nodes": row["num_nodes"], "accepted": accepted} | {name: row[name] for name in names}


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """Read a JSONL file of {"seconds", "prompt_tokens", "output_tokens"}; return it in order of arrival."""
    arrivals = []
    for number, line in lines_of(read_text(path, "--trace")):
        place = f"--trace {path}, line {number}"
        arrivals.append(_load(Arrival, _parse(line, place), place))
    if not arrivals:
        raise ConfigError(Problem(f"--trace {path}", "holds no arrivals"))
    return tuple(sorted(arrivals, key=lambda arrival: arrival.seconds))


def _read_json(path: Path, flag: str) -> Any:
    return _parse(read_text(path, flag), f"{flag} {path}")


def _parse(text: str, place: str) -> Any:
    try:
        return value_of(text)
    except ValueError as error:
        raise ConfigError(Problem(place, f"not JSON: {error}")) from None


M = TypeVar("M", bound=Strict)


def _load(kind: type[M], raw: Any, place: str) -> M:
    try:
        return kind.load(raw)
    except ConfigError as error:
        problems = (Problem(f"{place}: {p.field}" if p.field else place, p.message) for p in error.problems)
        raise ConfigError(*problems) from None
