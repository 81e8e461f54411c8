"""The request of `secateur plan`, validated before anything is loaded.

`Hardware` holds published figures of a device, from which `cluster.planner` predicts without measurements.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from secateur.config import read_text
from secateur.errors import ConfigError, Problem
from secateur.jsonl import value_of
from secateur.schema import Strict, did_you_mean
from secateur.token_tree import MAX_NODES

Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
Nodes = Annotated[int, Field(ge=0, le=MAX_NODES)]
"""Draft nodes of one tree, without its root; 0 = no speculation."""


class Hardware(Strict):
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


class PlanRequest(Strict):
    """What to predict; without hardware, only the topology is shown."""

    hardware: Hardware | None = None
    acceptance: tuple[Probability, ...] = ()
    """Chances that the first, the second, ... child of an accepted node is accepted; () = typical ones."""
    batches: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Batch sizes: requests that decode together."""
    context: PositiveInt = 512
    """Cached tokens per request."""
    nodes: Nodes | None = None
    """Draft nodes of every tree; None = the best for each batch."""

    @field_validator("acceptance")
    @classmethod
    def _one_is_accepted(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if sum(values) > 1:
            raise ValueError(f"at most one child is accepted, so these add up to at most 1 (got {sum(values):g})")
        return values

    @field_validator("batches")
    @classmethod
    def _rising(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(values)))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        given = [name for name in ("acceptance", "batches", "context", "nodes") if name in self.model_fields_set]
        if given and self.hardware is None:
            flag = "--batch" if given[0] == "batches" else f"--{given[0]}"
            raise ConfigError(Problem(flag, "belongs to a prediction; add --hardware NAME"))
        return self


def read_hardware(name: str) -> Hardware:
    """Return a known device by name, or read a JSON file. Raises ConfigError with every problem in it."""
    if name.lower() in HARDWARE:
        return HARDWARE[name.lower()]
    if not (name.endswith(".json") or "/" in name):
        near = did_you_mean(name, HARDWARE)
        raise ConfigError(Problem("--hardware", f"{name!r} is not known{near}; or write the name of a .json file"))
    place, text = f"--hardware {name}", read_text(Path(name), "--hardware")
    try:
        return Hardware.load(value_of(text))
    except ConfigError as error:
        problems = (Problem(f"{place}: {p.field}" if p.field else place, p.message) for p in error.problems)
        raise ConfigError(*problems) from None
    except ValueError as error:
        raise ConfigError(Problem(place, f"not JSON: {error}")) from None
