"""Checkpoints by name: a folder of this machine, or an id of the Hugging Face hub.

    resolve_path(name, revision=None) -> Path     the folder; of an id, what says which model it is: no weights yet
    fetch_weights(name, folder) -> None           of an id, the weights that an engine reads

Two steps, so that a model which cannot run is refused before gigabytes of it are fetched.
"""

from __future__ import annotations

from pathlib import Path

from workers.models.checkpoint import weight_names

_DESCRIBING = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_OTHER_FOLDERS = ["[!a]*/*"]
"""The same model in other formats (original, onnx); `additional_chat_templates` is the one folder with files for us."""


def resolve_path(name: str, revision: str | None = None) -> Path:
    """The local folder of a checkpoint; of a hub id configuration and tokenizer are fetched or found in the cache.

    Raises:
        FileNotFoundError: neither a folder nor something the hub can give; the message keeps the hub's reason.
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


def fetch_weights(name: str, folder: Path) -> None:
    """Fetch the weight files of a hub id into `folder`, which `resolve_path` gave for it, unless they are there.

    Of a local folder it only checks that they are there. Raises FileNotFoundError if they are not, or the hub fails.
    """
    is_local = Path(name).expanduser().is_dir()
    present = {path.name for path in folder.iterdir()}
    wanted = weight_names(folder, present if is_local else present | _names_on_hub(name, folder.name))
    missing = [file for file in wanted if not (folder / file).exists()]
    if missing and not is_local:
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(name, revision=folder.name, allow_patterns=missing)
        except Exception as error:
            raise FileNotFoundError(f"cannot fetch the weights of {name!r} from the hub: {error}") from error
        missing = [file for file in missing if not (folder / file).exists()]
    if missing:
        raise FileNotFoundError(f"no weights in {folder}: {', '.join(missing)} not found")


def _names_on_hub(name: str, commit: str) -> set[str]:
    """The files of a repository; none if the hub cannot be asked, as where only the cache is to be used."""
    from huggingface_hub import HfApi

    try:
        return set(HfApi().list_repo_files(name, revision=commit))
    except Exception:
        return set()
