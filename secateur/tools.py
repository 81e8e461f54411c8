"""Functions that a chat may call: what a request says about them, and the JSON schema of calls that it demands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from secateur.bodies import Body, Structure

MAX_TOOLS = 128  # OpenAI's
_DATA = {"const", "enum", "default", "examples"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
"""Keywords of JSON schemas whose values are no schemas, and those that have schemas by names."""
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ToolFunction(Body):
    """A function's name, purpose and parameters."""

    name: ToolName
    """Letters, digits, underscores, dots and dashes."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments; None = it has none."""
    strict: bool = False
    """Has no effect: calls that `tool_choice` demands always follow the schema, and calls of the model's own choice are
    whatever it writes."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments, an object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters if "$ref" in self.parameters else {"type": "object", **self.parameters}


class Tool(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    """Only functions are supported."""
    function: ToolFunction
    """The function."""


class NamedFunction(Body):
    """The function of a `tool_choice`."""

    name: ToolName
    """One of the functions in `tools`."""


class NamedTool(Body):
    """A `tool_choice` that demands one function."""

    type: Literal["function"]
    """Only functions are supported."""
    function: NamedFunction
    """The function to call."""


def calls_of(tools: Sequence[Tool], *, parallel: bool) -> Structure:
    """Return the structure of at least one call: a JSON array of {"name": ..., "parameters": ...}."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": {"$ref": f"#/$defs/{_escaped(tool.function.name)}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": {tool.function.name: _moved(tool.function) for tool in tools},
    }
    return Structure("json", schema if parallel else schema | {"maxItems": 1}, "tools", "usual")


def _moved(function: ToolFunction) -> Any:
    """Return the schema of the arguments with references for its place below `$defs`."""
    place = f"#/$defs/{_escaped(function.name)}"

    def moved(value: Any, *, has_names: bool = False) -> Any:
        """Return a schema, a list of schemas, or, with `has_names`, schemas by names, which are no keywords."""
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        if has_names:
            return {name: moved(item) for name, item in value.items()}
        schema = value | {
            key: moved(item, has_names=key in _BY_NAME) for key, item in value.items() if key not in _DATA
        }
        if isinstance(reference := value.get("$ref"), str) and reference.startswith("#"):
            schema["$ref"] = place + reference[1:]
        return schema

    return moved(function.schema_of_arguments)


def _escaped(name: str) -> str:
    """Return a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
