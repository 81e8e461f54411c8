"""Checks a pair's tensors by the headers of its files, before a process starts and before weights are fetched.

The models are built on torch's meta device, with the loaders of the ranks. So a tensor that is missing, unknown or of
another shape is the same error here as there, only earlier.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from secateur.config import EngineArgs
from secateur.errors import ConfigError
from workers.config import EngineConfig
from workers.models.hub import headers_of, weight_files
from workers.models.layers import Runtime, TensorParallel
from workers.models.load import load_decoder
from workers.models.specs import DraftSpec, ModelSpec, Specs


def check_tensors(args: EngineArgs, config: EngineConfig, specs: Specs) -> None:
    """Check the tensors of target and drafter, unless their headers cannot be had. Raises ConfigError."""
    draft, drafter = config.draft, args.speculative_config
    has_own = draft is not None and drafter is not None and drafter.model is not None and draft.model_path
    with (
        unheard(logging.getLogger("workers.models")),
        _hollow(args.model, Path(config.model_path)) as target,
        _hollow((drafter.model if has_own and drafter else "") or "", Path(draft.model_path if draft else "")) as head,
    ):
        try:
            runtime = Runtime(tp=TensorParallel(0, config.tensor_parallel_size), device="meta")
            taps = () if specs.draft is None else specs.draft.tap_layers
            load_decoder(target, specs.target, runtime, taps, config.max_model_len)
            if draft is not None and specs.draft is not None:
                check_drafter(specs.draft, head if has_own else target, target, draft.tensor_parallel_size, config)
        except FileNotFoundError:  # what is here, or on the hub, is told when the weights are fetched
            return
        except ValueError as error:
            told = str(error).replace(str(target), config.model_path)
            raise ConfigError(told.replace(str(head), draft.model_path) if draft and has_own else told) from error


def check_drafter(spec: DraftSpec, path: Path, target: Path, size: int, config: EngineConfig) -> None:
    """Check the tensors of a drafter in a folder. size: of its ranks. Raises ValueError, FileNotFoundError."""
    from drafter.methods import head_class
    from workers.models.fusion import load_fusion

    runtime = Runtime(tp=TensorParallel(0, size), device="meta")
    if isinstance(spec, ModelSpec):
        load_decoder(path, spec, runtime, max_model_len=config.max_model_len)
    else:
        head_class(spec).load(spec, path, target, runtime)
    load_fusion(path, spec, "meta")


@contextmanager
def unheard(logger: logging.Logger) -> Iterator[None]:
    """Keep back what the loaders log: the ranks say it, and of their own devices."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _hollow(name: str, folder: Path) -> Iterator[Path]:
    """Yield a folder with the files of a checkpoint, or with hollow ones: the headers of those that are on the hub."""
    wanted = weight_files(name, folder) if name and folder.is_dir() else []
    if not name or all((folder / file).exists() for file in wanted):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="secateur-headers-") as made:
        for present in folder.iterdir():
            (Path(made) / present.name).symlink_to(present.resolve())
        for file, header in headers_of(name, folder, wanted).items():
            _write_hollow(Path(made) / file, header)
        yield Path(made)


def _write_hollow(file: Path, header: dict[str, dict[str, object]]) -> None:
    """Write a safetensors file of this header, whose data is a hole that takes no space."""
    text = json.dumps(header).encode()
    size = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)  # type: ignore[index]
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + size)
