"""vLLM's spellings of settings, and what replaces those settings of vLLM and SGLang that Secateur does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from secateur.errors import ConfigError, Problem
from secateur.settings import EngineSettings, Setting, settings_of

_FILE = Path(__file__).with_name("other_projects.txt")
"""Names of other projects, and what to do here instead."""
_OBJECT = """as in '{"method": "ngram"}'"""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNT = re.compile(r"(\d+)(?:\.(\d+))?([kKmMgGtT])")


def _read_sections() -> Iterator[dict[str, str]]:
    """Yield the texts by name, from each section of the file."""
    for section in _FILE.read_text(encoding="utf-8").split("\n[")[1:]:
        lines = (line.partition(": ") for line in section.splitlines()[1:])
        yield {name: text for names, _, text in lines for name in names.split()}


_VLLM_ADVICE, SGLANG_ADVICE, SPECULATIVE_ADVICE, METHODS, SHORT_NAMES, COMMANDS = _read_sections()
ADVICE = _VLLM_ADVICE | {
    name: f"write --{ours.replace('_', '-')}"
    for ours, setting in settings_of(EngineSettings).items()
    for name in setting.flag.vllm_names
}
"""Advice on what to write instead of each of vLLM's settings; the reference page reference/vllm.md, too.

The others are for SGLang's options, without those that vLLM has too, for keys and methods of vLLM's speculative
configuration, and for commands. SHORT_NAMES has the long names of vLLM's short options that Secateur does not have; -O1
to -O3 are treated likewise.
"""
NEEDLESS = frozenset(
    "--enable-chunked-prefill --enable-auto-tool-choice --exclude-tools-when-tool-choice-none "
    "--enable-prompt-tokens-details --enable-server-load-tracking --enable-request-id-headers --disable-log-requests "
    "--disable-uvicorn-access-log".split()
)
"""Flags of vLLM that ask for what is so in any case: on a command line they get a warning."""
_FAMILIES = {"enable-lora": "lora-modules", "lora-": "lora-modules", "mm-": "language-model-only"}
"""Settings by the beginning of their name, and one with the same advice."""


def project_of(name: str) -> str:
    """Return whose option it is that `advice_about` knows."""
    return "SGLang" if name.removeprefix("--") in SGLANG_ADVICE else "vLLM"


def advice_about(name: str) -> str | None:
    """Return what to use instead of a setting of vLLM or SGLang, or None where neither has it or Secateur has it too.

    `name` is an option such as --block-size, -pp or --no-enable-chunked-prefill, or a key such as block_size.
    """
    if name.startswith("-O"):
        return ADVICE["compilation-config"]
    long = SHORT_NAMES.get(name, name).removeprefix("--").replace("_", "-")
    if long.removeprefix("no-") == "enable-chunked-prefill" and long.startswith("no-"):
        return "prompts are always computed in chunks; leave it out, and raise --max-num-batched-tokens"
    for known in (long, long.removeprefix("no-")):
        if (advice := ADVICE.get(known) or SGLANG_ADVICE.get(known)) is not None:
            return advice
        if found := [like for start, like in _FAMILIES.items() if known.startswith(start)]:
            return ADVICE[found[0]]
    return None


def read_count(text: str) -> int:
    """Return a number such as 4096, 32k (32,000), 32K (32,768) or 1.5M (1,572,864). Raises ValueError."""
    if re.fullmatch(r"-?\d+", text.strip()):
        return int(text)
    if (match := _COUNT.fullmatch(text.strip())) is None:
        raise ValueError(f"must be a whole number such as 4096, 32k (32000) or 32K (32768) (got {text!r})")
    whole, fraction, unit = match[1], match[2] or "", match[3]
    number, rest = divmod(int(whole + fraction) * _UNITS[unit], 10 ** len(fraction))
    if rest:
        raise ValueError(f"must be a whole number; {text} is not")
    return number


def in_our_words(settings: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return settings, whose keys have underscores, without vLLM's spellings.

    `no_KEY: true` becomes `KEY: false`, `speculative_config.KEY` a key of it, text that is JSON an object or a list,
    32k a number and half a dtype. Raises ConfigError, also for vLLM's settings that are not among our `fields`.
    """
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in settings.items():
        name, dot, inner = key.partition(".")
        positive = name.removeprefix("no_")
        try:
            if dot and name == "speculative_config":
                _add_key(found, settings, inner, value)
            elif name not in fields and positive in fields and type(value) is bool:
                _put(found, settings, positive, not value)
            elif name not in fields and (advice := advice_about(name)):
                problems.append(Problem(key, f"is a setting of vLLM that Secateur does not have: {advice}"))
            elif key != "speculative_config" or key not in found:
                found[key] = _READERS[key](value) if key in _READERS else value
        except ValueError as error:
            problems += error.problems if isinstance(error, ConfigError) else [Problem(key, str(error))]
    if problems:
        raise ConfigError(*problems)
    return found


def _add_key(found: dict[str, Any], settings: Mapping[str, Any], key: str, value: Any) -> None:
    base = found.get("speculative_config", _read_object(settings.get("speculative_config", {})))
    name = key.replace("-", "_")
    if not isinstance(base, dict) or base.get(name, value) != value:
        raise ValueError("contradicts speculative_config; keep one of the two")
    found["speculative_config"] = {**base, name: value}


def _put(found: dict[str, Any], settings: Mapping[str, Any], key: str, value: bool) -> None:
    if settings.get(key, value) != value:
        raise ValueError(f"contradicts {key}: {str(settings[key]).lower()}; keep one of the two")
    found[key] = value


def _read_length(value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "auto":
        raise ValueError("must be a number; leave it out to have the model's own limit")
    return read_count(value) if isinstance(value, str) else value


def _read_object(value: Any) -> Any:
    """Return the value, or the object that its text describes. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); write it in single quotes, {_OBJECT}") from None
    if not isinstance(read, dict):
        raise ValueError(f"must be a JSON object, {_OBJECT} (got {value})")
    return read


def _read_list(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
    return value


def _read_names(value: Any) -> Any:
    if value == "":
        raise ValueError("is empty; write a name, or leave it out")
    read = _read_list(value)
    return read[0] if isinstance(read, list) and len(read) == 1 else read


def _reader(setting: Setting) -> Callable[[Any], Any]:
    if setting.flag.has_unit:
        return _read_length
    if list[str] in setting.kinds:
        return _read_list
    names = setting.flag.vllm_values
    return lambda value: names.get(value, value) if isinstance(value, str) else value


_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: _reader(setting) for name, setting in settings_of(EngineSettings).items()},
    "speculative_config": _read_object,
    "served_model_name": _read_names,
}
