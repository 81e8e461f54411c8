"""The base of all request bodies of the OpenAI API: strict types, null, unknown and unsupported fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from secateur.errors import ConfigError, Problem


class Unsupported(NamedTuple):
    """A known parameter with a value that is not implemented."""

    param: str
    why: str


def wrong(field: str, message: str) -> ConfigError:
    """Return an error that names `field`, for validators that look at several fields."""
    return ConfigError(Problem(field, message))


_MOST_LISTED = 20
# param -> (values that change nothing, why others are refused). None always changes nothing.
_OBSOLETE = 'is obsolete; write structured_outputs={{"{}": ...}}'
_TOOLS = "belongs to chats; remove it"
_FUNCTIONS = "is obsolete; write tools and tool_choice"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((), "choosing among more answers than are returned is not implemented; leave it out and set n"),
    "use_beam_search": ((False,), "beam search is not implemented"),
    "length_penalty": ((1,), "belongs to beam search, which is not implemented"),
    "suffix": (("",), "insertion is not implemented"),
    "logits_processors": (([],), "custom logits processors are not implemented"),
    "guided_json": ((), _OBSOLETE.format("json")),
    "guided_regex": ((), _OBSOLETE.format("regex")),
    "guided_choice": ((), _OBSOLETE.format("choice")),
    "guided_grammar": ((), _OBSOLETE.format("grammar")),
    "json_schema": ((), 'is not a field; write structured_outputs={"json": ...}'),
    "regex": ((), 'is not a field; write structured_outputs={"regex": ...}'),
    "ebnf": ((), 'is not a field; write structured_outputs={"grammar": ...}'),
    "structural_tag": ((), "structural tags are not implemented"),
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _FUNCTIONS),
    "function_call": (("none", "auto"), _FUNCTIONS),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "reasoning_effort": (("none",), "belongs to chats; remove it"),
    "modalities": ((["text"],), "only text is produced"),
    "audio": ((), "only text is produced"),
    "prediction": ((), "predicted outputs are not implemented"),
    "chat_template": ((), "the model's own chat template is used; it cannot be replaced per request"),
    "documents": (([],), "documents are not implemented; put them into the messages"),
    "lora_path": ((), "adapters are not implemented"),
    "kv_transfer_params": ((), "KV transfer is not implemented"),
    "spaces_between_special_tokens": ((True,), "is not implemented; leave it out"),
    "return_spec_tokens_details": ((False,), "use return_speculative_stats"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
    "rid": ((), "use request_id"),
}


class Body(BaseModel):
    """Base of all request models. Types are strict; null means "not given"."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    def unsupported(self) -> list[Unsupported]:
        """Return every known parameter with a value that is not implemented."""
        return unsupported_of(self.model_extra or {})

    @property
    def unread_parts(self) -> list[str]:
        """Return the parts of messages that are no text: their places and types."""
        return []

    def ignored(self) -> list[str]:
        """Return unknown fields, sorted; the server accepts them and lists them in `x-secateur-ignored`."""
        return sorted((self.model_extra or {}).keys() - UNSUPPORTED.keys())


UnsupportedContent = Literal["error", "placeholder"]
"""What becomes of parts of messages that are no text."""


def placeholder(type: str) -> str:
    """Return the text in the place of a part of a message that is no text."""
    kind = next((kind for kind in ("image", "audio", "video", "file") if kind in type), "part")
    return f"[{kind} left out: this model reads text only]"


def unsupported_of(values: Mapping[str, Any]) -> list[Unsupported]:
    """Return every known parameter among `values` whose value is not implemented."""
    return [
        Unsupported(param, why)
        for param, (neutral, why) in UNSUPPORTED.items()
        if values.get(param) is not None and not any(_is_same(values[param], value) for value in neutral)
    ]


def _is_same(value: Any, other: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def told(message: str) -> WrapValidator:
    """Replace pydantic's list of errors, one for each type of a union, by `message`."""

    def checked(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(checked)


def listed(items: Iterable[str]) -> str:
    """Join the first items with commas and add how many more there are, for error messages."""
    all_items = list(items)
    shown = [*all_items[:_MOST_LISTED], *([f"and {more} more"] if (more := len(all_items) - _MOST_LISTED) > 0 else [])]
    return ", ".join(shown)


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    told("must be at most 16 pairs of strings, with keys of up to 64 and values of up to 512 characters"),
]
"""What OpenAI lets clients attach to objects."""


class Structure(NamedTuple):
    """A structured output: JSON of a schema, a match of a regular expression or a grammar, or one of some texts."""

    kind: Literal["json", "regex", "choice", "grammar"]
    source: dict[str, Any] | str | list[str]
    param: str
    """The request's field that asks for it."""
    whitespace: Literal["free", "none", "usual"] = "free"
    """Between the tokens of JSON: any, none, or a space behind each comma and colon."""
    closes_objects: bool = True
    """Objects have no properties that the schema does not name, where it says nothing of them."""
    thought: tuple[str, str] | None = None
    """The marks around reasoning before it (`workers.sampling.grammar.ThoughtMarks`); None = it begins at once."""
