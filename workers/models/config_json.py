"""Reads the JSON files of a model folder and checks the settings that no model here supports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",  # its text model alone, unless that is a Ministral-3
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",  # its text model alone
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK25ForConditionalGeneration": "deepseek_v3",  # its text model alone
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "YoutuForCausalLM": "youtu",
    "MiMoForCausalLM": "mimo",  # Qwen2 with a multi-token prediction layer
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or return {} if the file does not exist. Raises ValueError for any other content."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # invalid JSON or UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(found).__name__}")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Read a folder's config.json. Raises FileNotFoundError if there is none, and ValueError if it is not valid."""
    if raw := read_json(path / "config.json"):
        return raw
    raise FileNotFoundError(f"no config.json in {path}")


def eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    """Return the EOS token ids of config.json and generation_config.json; chat models list theirs in either.

    Raises ValueError for anything but a token id or a list of them.
    """
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        own = value if isinstance(value, list) else [] if value is None else [value]
        if strange := [item for item in own if type(item) is not int]:
            raise ValueError(f"eos_token_id: {strange[0]!r} is no token id; write a number or a list of numbers")
        ids.update(dict.fromkeys(own))
    return tuple(ids)
