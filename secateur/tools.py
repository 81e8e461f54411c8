"""Tools that a chat may call: what a request says about them, and the JSON schema of calls that it demands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from secateur.bodies import Body, Structure, wrong

MAX_TOOLS = 128  # OpenAI's
_DATA = {"const", "enum", "default", "examples"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
"""Keywords of JSON schemas whose values are no schemas, and those that have schemas by names."""
CALLED_TYPES = ("function", "custom")
"""Types of tools that a model can call here."""
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


class Grammar(Body):
    """What the input of a custom tool must match."""

    syntax: Literal["lark", "regex"]
    """How it is written."""
    definition: str
    """A grammar in Lark's notation, or a regular expression that all of the input matches."""


class InputFormat(Body):
    """How the input of a custom tool is written."""

    type: Literal["text", "grammar"] = "text"
    """Any text, or a text of the grammar."""
    grammar: Grammar | None = None
    """With the type `grammar`."""

    @model_validator(mode="after")
    def _grammar_with_its_type(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise wrong("grammar", f'belongs to the type "grammar", and only to it (got {self.type!r})')
        return self


class CustomTool(Body):
    """A tool whose input is text, not arguments."""

    name: ToolName
    """As of functions."""
    description: str | None = None
    """What it does, for the model."""
    format: InputFormat = InputFormat()
    """Binds the input of calls that `tool_choice` demands; the model is told of it in any case."""

    @property
    def function(self) -> ToolFunction:
        """Return the function that models are told of, because their templates know no other tools."""
        grammar, text = self.format.grammar, {"type": "string"}
        about = [self.description] if self.description else []
        if grammar is not None:
            kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
            about.append(f"The input matches this {kind}:\n{grammar.definition}")
            text |= {"pattern": f"^(?:{grammar.definition})$"} if grammar.syntax == "regex" else {}
        arguments = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return ToolFunction(
            name=self.name,
            description="\n\n".join(about) or None,
            parameters={**arguments, "additionalProperties": False},
        )


class Tool(Body):
    """One entry of `tools`."""

    type: str
    """`function` or `custom`. Tools of other types are left out, and named as ignored."""
    function: ToolFunction | None = None
    """The function."""
    custom: CustomTool | None = None
    """The custom tool."""

    @model_validator(mode="after")
    def _one_of_its_type(self) -> Self:
        if self.type in CALLED_TYPES and getattr(self, self.type) is None:
            raise wrong(self.type, "is required")
        return self

    @property
    def called(self) -> ToolFunction | None:
        """Return the function, or the one that stands for a custom tool; None for tools of other types."""
        if self.type == "custom" and self.custom is not None:
            return self.custom.function
        return self.function if self.type == "function" else None

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar of a custom tool, if it has one."""
        return self.custom.format.grammar if self.type == "custom" and self.custom is not None else None


class NamedFunction(Body):
    """The name of a tool in a `tool_choice`."""

    name: ToolName
    """One of those in `tools`."""


class AllowedTool(Body):
    """A tool of `allowed_tools`."""

    type: str
    """As of the tool."""
    function: NamedFunction | None = None
    """The function."""
    custom: NamedFunction | None = None
    """The custom tool."""

    @property
    def name(self) -> str | None:
        """Return the tool's name; tools of other types have none here."""
        named = {"function": self.function, "custom": self.custom}.get(self.type)
        return None if named is None else named.name

    @model_validator(mode="after")
    def _one_of_its_type(self) -> Self:
        if self.type in CALLED_TYPES and self.name is None:
            raise wrong(self.type, "is required")
        return self


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    """As a `tool_choice` of this name."""
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS)]
    """The tools that the model may call. It is not told of the others."""


class ToolChoice(AllowedTool):
    """A `tool_choice` that demands one tool, or allows some."""

    type: Literal["function", "custom", "allowed_tools"]
    """What it names."""
    allowed_tools: AllowedTools | None = None
    """With the type of this name."""

    @model_validator(mode="after")
    def _allows_some(self) -> Self:
        if (self.type == "allowed_tools") != (self.allowed_tools is not None):
            raise wrong("allowed_tools", f"belongs to the type of this name, and only to it (got {self.type!r})")
        return self


def calls_of(functions: Sequence[ToolFunction], *, parallel: bool) -> Structure:
    """Return the structure of at least one call: a JSON array of {"name": ..., "parameters": ...}."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "parameters": {"$ref": f"#/$defs/{_escaped(function.name)}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": {function.name: _moved(function) for function in functions},
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
