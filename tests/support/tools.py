"""Tools, an answer that calls one of them, and tokenizers whose templates teach calls."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

from tests.cluster.conftest import MODEL

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "a"}
ORDER = {
    "type": "object",
    "properties": {"what": {"$ref": "#/$defs/thing"}, "more": {"$ref": "#"}, "const": {"$ref": "#/$defs/data"}},
    "required": ["what"],
    "additionalProperties": False,
    "$defs": {"thing": {"enum": ["tea", 5]}, "data": {"enum": [{"$ref": "#/a"}, {"const": "#"}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "order", "description": "Orders a thing.", "parameters": ORDER}},
    {"type": "function", "function": {"name": "stop"}},
]
HERMES = '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>'
"""Part of a chat template that teaches this format."""
CALLED = 'I order.\n<tool_call>\n{"name": "order", "arguments": {"what": "tea"}}\n</tool_call>'


def copied_tokenizer(tmp_path: Path, template: str) -> Path:
    """Return a folder with the bundled tokenizer and another chat template."""
    folder = copytree(MODEL, tmp_path / "model", ignore=lambda _, names: [n for n in names if "safetensors" in n])
    (folder / "chat_template.jinja").write_text(template)
    return folder
