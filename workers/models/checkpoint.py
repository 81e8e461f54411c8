"""Where a checkpoint's tensors are: `Weights`, slice by slice.

    Weights(path, dtype=None, device="cpu")
        .get(name, dim=None, rank=0, size=1) -> Tensor   .get_range(name, dim, start, end)   .has(name)   .names()
        .are_equal(one, other, start, end)             of two matrices' rows
        .finish(allowed=...)                           ValueError naming tensors that nobody asked for
    split(total, rank, size) -> (start, end)           the range of a dimension that a rank owns
    weight_names(path, present) -> list                the files that hold the weights

torch is imported when a checkpoint is opened.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.models.config_json import fp8_block, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MTP_PREFIXES = ("mtp.", "model.mtp_layers.")
"""Multi-token prediction layers in a target's checkpoint: the drafter's, see `workers.models.fc_head_format`."""

FP8_SCALE = "_scale_inv"
"""Ends the name of the block scales of a float8 tensor, as DeepSeek, Qwen and others publish them."""

_COMPARED_ROWS = 4096
"""Rows of two matrices that are compared at a time."""

_DEQUANTISED_ITEMS = 1 << 22
"""Values that are dequantised at a time: the float32 copies of them and of their scales come and go."""


def split(total: int, rank: int, size: int) -> tuple[int, int]:
    """The contiguous part of `total` items that a rank owns; parts differ by at most one item."""
    return total * rank // size, total * (rank + 1) // size


class Weights:
    """The tensors of one checkpoint folder: safetensors (single, sharded) or, failing that, pytorch_model.bin.

    Files are memory-mapped and only the slices asked for are read, then cast and moved one tensor at a time; a rank
    never holds more than its own share plus one tensor. Every returned tensor owns its memory.
    Tensors quantised in FP8 blocks are dequantised as they are read, so a model takes the memory of `dtype` (in
    bfloat16 twice its files) and runs at the speed of `dtype`; the rounding of its weights is all that stays of FP8.

    Args:
        path: the checkpoint folder.
        dtype: floating tensors are cast to it (None = as stored); integer and boolean ones keep theirs.
        device: where the slices go.
        rename: applied to every stored name first, so that formats differing by a prefix load alike.
    """

    def __init__(
        self,
        path: Path | str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rename: Callable[[str], str] = str,
    ) -> None:
        import torch
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        self.dtype = dtype
        self.device = torch.device(device)
        self._slices: dict[str, Any] = {}
        self._used: set[str] = set()
        quantization = read_json(self.path / "config.json").get("quantization_config")
        self._fp8_block = fp8_block(quantization, self.path) if quantization else None
        for file in _weight_files(self.path):
            if file.suffix == ".bin":
                self._slices.update({rename(name): tensor for name, tensor in _read_pickle(file).items()})
                continue
            try:
                handle = safe_open(file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise _damaged(file, error) from error
            self._slices.update({rename(name): handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118

    def has(self, name: str) -> bool:
        return name in self._slices

    def names(self) -> list[str]:
        """All tensors but the scales of others."""
        scales = {name + FP8_SCALE for name in self._slices}
        return [name for name in self._slices if name not in scales]

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a stored tensor. Raises ValueError if it is missing."""
        stored = self._find(name)
        return tuple(stored.shape if hasattr(stored, "shape") else stored.get_shape())

    def get(self, name: str, dim: int | None = None, rank: int = 0, size: int = 1) -> Tensor:
        """A tensor, or the `rank`-th of `size` parts of it along `dim`. Raises ValueError if it is missing."""
        if dim is None or size == 1:
            return self.get_range(name, 0, 0, None)
        return self.get_range(name, dim, *split(self.shape(name)[dim], rank, size))

    def get_range(self, name: str, dim: int, start: int, end: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Items start:end along `dim` of a tensor, in `dtype` (None = ours). Raises ValueError if it is missing."""
        import torch

        stored = self._find(name)
        self._used.add(name)
        part = stored[(slice(None),) * dim + (slice(start, end),)] if self.shape(name) else stored[...]
        is_float8 = part.dtype is torch.float8_e4m3fn
        own_dtype = torch.float32 if is_float8 else part.dtype
        dtype = (dtype or self.dtype or own_dtype) if part.is_floating_point() else own_dtype
        # A fresh tensor: the mapped file may be misaligned, and one slice would keep all of it mapped.
        values = torch.empty(part.shape, dtype=dtype, device=self.device)
        if not is_float8:
            return values.copy_(part)
        step = max(1, _DEQUANTISED_ITEMS // max(1, part[:1].numel()))
        first = [start if axis == dim else 0 for axis in range(part.dim())]
        for row in range(0, part.shape[0], step):
            piece = part[row : row + step].to(self.device)
            values[row : row + step] = self._dequantise(name, piece, [first[0] + row, *first[1:]])
        return values

    def _dequantise(self, name: str, part: Tensor, first: list[int]) -> Tensor:
        """float32 values of a float8 slice [..., R, C] that begins at `first`, an index along every dimension.

        A block of rows x columns shares the factor `name`_scale_inv[..., row // rows, column // columns].
        """
        import torch

        scale_name = name + FP8_SCALE
        if self._fp8_block is None or scale_name not in self._slices:
            raise ValueError(f"{self.path}: float8 tensor {name!r} has no block scales {scale_name!r}")
        scale = self._find(scale_name)[...].to(self.device, torch.float32)
        self._used.add(scale_name)
        for axis in range(part.dim()):
            block = self._fp8_block[axis - part.dim() + 2] if axis >= part.dim() - 2 else 1
            index = torch.arange(first[axis], first[axis] + part.shape[axis], device=self.device) // block
            scale = scale.index_select(axis, index)
        return scale.mul_(part.to(torch.float32))

    def are_equal(self, one: str, other: str, start: int, end: int) -> bool:
        """Whether rows start:end of two stored matrices are the same, as they are stored. Both count as asked for.

        Read block by block, up to the first that differs. float8 matrices, which torch does not compare and whose
        scales may differ, count as different. Raises ValueError if one is missing.
        """
        import torch

        first, second = self._find(one), self._find(other)
        self._used.update((one, other))
        if self.shape(one) != self.shape(other):
            return False
        for row in range(start, end, _COMPARED_ROWS):
            rows = slice(row, min(end, row + _COMPARED_ROWS))
            one_part, other_part = first[rows], second[rows]
            if one_part.dtype != other_part.dtype or one_part.dtype is torch.float8_e4m3fn:
                return False
            if not torch.equal(one_part, other_part):
                return False
        return True

    def finish(self, allowed: Callable[[str], bool] | Iterable[str] = ()) -> None:
        """Raise ValueError if the checkpoint holds tensors that were never asked for, other than the allowed names.

        A tensor that nobody reads means a model that is not the one we built: silently skipping it would only show
        as bad text.
        """
        known = allowed if callable(allowed) else set(allowed).__contains__
        unknown = sorted(name for name in self._slices if name not in self._used and not known(name))
        if unknown:
            raise ValueError(f"{self.path}: {len(unknown)} unknown tensors: {', '.join(unknown[:8])}")

    def _find(self, name: str) -> Any:
        if name not in self._slices:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        return self._slices[name]


def weight_names(path: Path, present: Collection[str]) -> list[str]:
    """The files that a checkpoint's tensors are read from, of those in its folder (or in its repository): sharded or
    single safetensors, else pickles. Raises ValueError for an index that names none.

    Of other safetensors files all are read but "consolidated" ones: they repeat the weights under Mistral's own names.
    """
    if "model.safetensors.index.json" in present:
        return _indexed(path / "model.safetensors.index.json")
    if "model.safetensors" in present:
        return ["model.safetensors"]
    if "pytorch_model.bin.index.json" in present:
        return _indexed(path / "pytorch_model.bin.index.json")
    others = [name for name in present if Path(name).name == name and name.endswith(".safetensors")]
    found = sorted(name for name in others if not name.startswith("consolidated"))
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
    """The tensors of a pytorch_model.bin, mapped. Raises ValueError for one that holds anything else."""
    import torch

    convert = "convert it: write its tensors with safetensors.torch.save_file(tensors, 'model.safetensors')"
    try:
        # Before torch 1.6 files were no zip archives, and such cannot be mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(error))
        what = f"more than tensors ({found[1]})" if found else "no tensors that can be read"
        raise ValueError(
            f"{file} is a pickle with {what}, and reading such a file would run code of its author's; take a "
            f"checkpoint with safetensors, or, where you trust it, {convert}"
        ) from None  # torch's own advice is to read it all the same
    except (EOFError, OSError, RuntimeError, struct.error) as error:
        raise _damaged(file, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} is no plain mapping of names to tensors; {convert}")
    return tensors
