"""Reads a checkpoint's tensors slice by slice.

torch is only imported when a checkpoint is opened.
"""

from __future__ import annotations

import logging
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.models.config_json import read_json
from workers.models.quantization import read_quantization, weights_of
from workers.models.quantized_weight import QuantizedWeight, dtype_of, shape_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.kernels.block_scaled import BlockScaled

logger = logging.getLogger(__name__)

_COMPARED_ROWS = 4096
"""Rows that `are_equal` compares at a time."""

_DEQUANTIZED_ITEMS = 1 << 22
"""Values that are dequantized at a time, which limits their temporary float32 copies."""


def split(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return a rank's contiguous part of `total` items; parts differ by at most one item."""
    return total * rank // size, total * (rank + 1) // size


class Weights:
    """The tensors of a checkpoint folder: safetensors (single or sharded) or, without these, pytorch_model.bin.

    Files are memory-mapped. Only the requested slices are read, cast and moved, one tensor at a time, so a rank never
    holds more than its share plus one tensor. Every returned tensor owns its memory.
    Quantized tensors (`workers.models.quantization`) are dequantized when they are read: they take the memory of
    `dtype` and are multiplied at its speed. `matrix` leaves those of the types in `kept` in their bits.

    Args:
        path: the checkpoint folder.
        dtype: floating-point tensors are cast to it (None = as stored); integer and boolean tensors are not.
        device: device of the returned tensors.
        kept: types of values of which `matrix` returns `BlockScaled`, see `workers.kernels.select.Kernels.kept_types`.
        rename: maps stored names to the names used here, for formats that differ by a prefix.
    """

    def __init__(
        self,
        path: Path | str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rename: Callable[[str], str] = str,
        *,
        kept: frozenset[torch.dtype] = frozenset(),
    ) -> None:
        import torch
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        self.dtype = dtype
        self.device = torch.device(device)
        self._slices: dict[str, Any] = {}
        self._used: set[str] = set()
        self.quantization = read_quantization(self.path)
        self._kept = kept
        assert dtype is not None or not kept
        self._has_told = False
        for file in _weight_files(self.path):
            if file.suffix == ".bin":
                self._slices.update({rename(name): tensor for name, tensor in _read_pickle(file).items()})
                continue
            try:
                handle = safe_open(file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise _damaged(file, error) from error
            self._slices.update({rename(name): handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118
        if self.quantization is not None:
            self._slices = weights_of(self._slices, self.quantization, self.path)

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has the tensor."""
        return name in self._slices

    def names(self) -> list[str]:
        """Return the names of all tensors; the parts of a quantized one have its name."""
        return list(self._slices)

    def kept(self, name: str) -> QuantizedWeight | None:
        """Return a matrix that `kept` lets stay in its bits, else None. Raises ValueError if it is missing."""
        stored = self._find(name)
        return stored if isinstance(stored, QuantizedWeight) and stored.kept_type in self._kept else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor. Raises ValueError if it is missing."""
        return shape_of(self._find(name))

    def get(self, name: str, dim: int | None = None, rank: int = 0, size: int = 1) -> Tensor:
        """Read a tensor, or the `rank`-th of `size` parts of it along `dim`. Raises ValueError if it is missing."""
        if dim is None or size == 1:
            return self.get_range(name, 0, 0, None)
        return self.get_range(name, dim, *split(self.shape(name)[dim], rank, size))

    def matrix(
        self,
        name: str,
        dim: int | None = None,
        rank: int = 0,
        size: int = 1,
        *,
        section: tuple[int, int] | None = None,
    ) -> Tensor | BlockScaled:
        """Read a matrix like `get`, in its bits if these are kept. section: split these rows or columns alone.

        A part of its columns that begins inside a block is dequantized, because its first block would be narrower.
        """
        spans = [(0, length) for length in self.shape(name)]
        if dim is not None:
            first, last = section or spans[dim]
            begin, end = split(last - first, rank, size)
            spans[dim] = first + begin, first + end
        if (stored := self.kept(name)) is not None:
            rows, columns = (slice(*span) for span in spans)
            assert self.dtype is not None
            if (block := stored.block_of(columns)) is not None:
                self._used.add(name)
                return stored.in_bits(rows, columns, block, self.device, self.dtype)
            if not self._has_told:
                why = "blocks of columns are cut, too narrow or mixed"
                logger.info("%s: %s is dequantized: its %s", self.path, name, why)
                self._has_told = True
        return self.get_range(name, dim or 0, *spans[dim or 0])

    def get_range(self, name: str, dim: int, start: int, end: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Read items start:end along `dim`, in `dtype` (None = self.dtype). Raises ValueError if it is missing."""
        import torch

        stored, shape = self._find(name), self.shape(name)
        self._used.add(name)
        if self.device.type == "meta":
            return self._hollow(stored, dim, start, end, dtype)
        if isinstance(stored, QuantizedWeight):
            spans = [slice(0, length) for length in shape]
            spans[dim] = slice(start, shape[dim] if end is None else end)
            return self._dequantized(stored, spans, dtype or self.dtype or torch.float32)
        part = stored[(slice(None),) * dim + (slice(start, end),)] if shape else stored[...]
        dtype = (dtype or self.dtype or part.dtype) if part.is_floating_point() else part.dtype
        # Copy, because the mapped file may be misaligned, and a view would keep all of it mapped.
        return torch.empty(part.shape, dtype=dtype, device=self.device).copy_(part)

    def _hollow(self, stored: Any, dim: int, start: int, end: int | None, dtype: torch.dtype | None) -> Tensor:
        """Return a tensor without values, so that shapes can be checked by the headers of files alone."""
        import torch

        shape = list(shape_of(stored))
        if shape:
            shape[dim] = len(range(*slice(start, end).indices(shape[dim])))
        is_float = isinstance(stored, QuantizedWeight) or dtype_of(stored).startswith(("F", "BF"))
        own = (dtype or self.dtype or torch.float32) if is_float else torch.int64
        return torch.empty(shape, dtype=own, device="meta")

    def _dequantized(self, stored: QuantizedWeight, spans: list[slice], dtype: torch.dtype) -> Tensor:
        """Return these values, of which a limited number is in float32 at a time."""
        import torch

        values = torch.empty([span.stop - span.start for span in spans], dtype=dtype, device=self.device)
        step = max(1, _DEQUANTIZED_ITEMS // max(1, values[:1].numel()))
        for row in range(0, len(values), step):
            first = spans[0].start + row
            piece = slice(first, min(first + step, spans[0].stop))
            values[row : row + step] = stored.read([piece, *spans[1:]], self.device)
        return values

    def are_equal(self, one: str, other: str, start: int, end: int) -> bool:
        """Return True if rows start:end of two stored matrices are equal. Both count as read.

        Rows are compared block by block until they differ. Quantized matrices, whose scales may differ, count as
        different. Raises ValueError if one is missing.
        """
        import torch

        first, second = self._find(one), self._find(other)
        self._used.update((one, other))
        if self.shape(one) != self.shape(other) or isinstance(first, QuantizedWeight) or self.device.type == "meta":
            return False
        for row in range(start, end, _COMPARED_ROWS):
            rows = slice(row, min(end, row + _COMPARED_ROWS))
            one_part, other_part = first[rows], second[rows]
            if one_part.dtype != other_part.dtype or not torch.equal(one_part, other_part):
                return False
        return True

    def finish(self, allowed: Callable[[str], bool] | Iterable[str] = ()) -> None:
        """Raise ValueError if the checkpoint contains tensors that were not read, except for allowed names.

        An unread tensor means that the model differs from ours. Ignored silently, it would only show as bad output.
        """
        known = allowed if callable(allowed) else set(allowed).__contains__
        unknown = sorted(name for name in self._slices if name not in self._used and not known(name))
        if unknown:
            raise ValueError(f"{self.path}: {len(unknown)} unknown tensors: {', '.join(unknown[:8])}")

    def _find(self, name: str) -> Any:
        if name not in self._slices:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        return self._slices[name]


def text_name(stored: str) -> str:
    """Convert a text tensor's name in a composite checkpoint to its name in the text model."""
    return re.sub(r"^(model\.)?language_model\.(model\.|(?=lm_head))?", _text_prefix, stored)


def _text_prefix(match: re.Match[str]) -> str:
    return "" if match.string.startswith("lm_head", match.end()) else "model."


def weight_names(path: Path, present: Collection[str]) -> list[str]:
    """Return a checkpoint's weight files among the files `present` in its folder or repository.

    These are sharded or single safetensors, else pickles. Of safetensors with other names, all are read but
    "consolidated" ones, which repeat the weights under Mistral's names, and adapters. Raises ValueError for an index
    without files.
    """
    if "model.safetensors.index.json" in present:
        return _indexed(path / "model.safetensors.index.json")
    if "model.safetensors" in present:
        return ["model.safetensors"]
    if "pytorch_model.bin.index.json" in present:
        return _indexed(path / "pytorch_model.bin.index.json")
    others = [name for name in present if Path(name).name == name and name.endswith(".safetensors")]
    found = sorted(name for name in others if not name.startswith(("consolidated", "adapter_model")))
    return found or ["pytorch_model.bin" if "pytorch_model.bin" in present else "model.safetensors"]


def _indexed(index: Path) -> list[str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{index} has no weight_map, which says in which file each tensor is")
    return sorted(set(files.values()))


def _weight_files(path: Path) -> list[Path]:
    present = {file.name for file in path.iterdir()} if path.is_dir() else set()
    files = [path / name for name in weight_names(path, present)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"no weights in {path}: {', '.join(missing)} not found")
    return files


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({str(error) or type(error).__name__}): fetch or copy it again")


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """Map the tensors of a pytorch_model.bin. Raises ValueError if it contains anything else."""
    import torch

    convert = "convert it: write its tensors with safetensors.torch.save_file(tensors, 'model.safetensors')"
    try:
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(error))
        what = f"more than tensors ({found[1]})" if found else "no tensors that can be read"
        raise ValueError(
            f"{file} is a pickle with {what}, and reading such a file would run code of its author's; take a "
            f"checkpoint with safetensors, or, where you trust it, {convert}"
        ) from None  # torch's message advises to load it anyway
    except (EOFError, OSError, RuntimeError, struct.error) as error:
        raise _damaged(file, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} is no plain mapping of names to tensors; {convert}")
    return tensors
