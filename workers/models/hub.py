"""Finds checkpoints by name: a local folder or an id of the Hugging Face hub.

Configuration and tokenizer come first, the weights later, so that an unsupported model is rejected before gigabytes are
downloaded.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.models.checkpoint import weight_names

_DESCRIBING = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_OTHER_FOLDERS = ["[!a]*/*"]
"""Folders with the model in other formats (original, onnx). Only `additional_chat_templates` is needed."""


def resolve_path(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a checkpoint, downloading configuration and tokenizer of a hub id unless cached.

    Raises:
        FileNotFoundError: neither a folder nor available on the hub; the message contains the hub's error.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise FileNotFoundError(f"no checkpoint folder at {name!r} (a hub id looks like 'organisation/model')")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=_DESCRIBING, ignore_patterns=_OTHER_FOLDERS)
        )
    except Exception as error:
        raise FileNotFoundError(f"cannot find checkpoint {name!r}, neither a folder nor on the hub: {error}") from error


def fetch_weights(name: str, folder: Path) -> list[str]:
    """Download the weight files of a hub id into `folder`, the result of `resolve_path`, unless they are there.

    For a local folder, only check that they exist. Returns the names of those that were not there. Raises
    FileNotFoundError if they do not exist, or the download fails.
    """
    is_local = Path(name).expanduser().is_dir()
    wanted = weight_files(name, folder)
    missing = [file for file in wanted if not (folder / file).exists()]
    if missing and not is_local:
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(name, revision=folder.name, allow_patterns=missing)
        except Exception as error:
            raise FileNotFoundError(f"cannot fetch the weights of {name!r} from the hub: {error}") from error
    if lost := [file for file in missing if not (folder / file).exists()]:
        raise FileNotFoundError(f"no weights in {folder}: {', '.join(lost)} not found")
    return missing


def weight_files(name: str, folder: Path) -> list[str]:
    """Return the names of a checkpoint's weight files, in its folder or on the hub. folder: see `fetch_weights`."""
    present = {path.name for path in folder.iterdir()}
    is_local = Path(name).expanduser().is_dir() or name.count("/") != 1
    return weight_names(folder, present if is_local else present | _names_on_hub(name, folder.name))


def headers_of(name: str, folder: Path, files: list[str]) -> dict[str, dict[str, Any]]:
    """Read the headers of a hub id's safetensors files, without their tensors; {} if the hub does not give all.

    Returns:
        dict: by file, the header's JSON: dtype, shape and data_offsets by tensor.
    """
    from huggingface_hub import HfApi

    def header(file: str) -> dict[str, Any]:
        found = HfApi().parse_safetensors_file_metadata(name, file, revision=folder.name)
        return {
            tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for tensor, info in found.tensors.items()
        }

    try:
        with ThreadPoolExecutor() as pool:
            return dict(zip(files, pool.map(header, files), strict=True))
    except Exception:
        return {}


def _names_on_hub(name: str, commit: str) -> set[str]:
    """Return the files of a repository, or none if the hub is not available, as in offline mode."""
    from huggingface_hub import HfApi

    try:
        return set(HfApi().list_repo_files(name, revision=commit))
    except Exception:
        return set()
