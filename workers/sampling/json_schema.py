"""JSON schemas as llguidance must get them: numbers that it follows exactly, objects without unnamed properties.

**Numbers.** llguidance computes in doubles, reads fractions with one rounding too many (as serde_json does) and cuts
integers to 64 bits. A number that it would change is an error that names the keyword. Bounds beyond 64 bits become the
last that it can follow; of the numbers of 64 bits that leaves out at most 1,024 at an end.

**Objects.** A schema that names properties and says nothing of others is closed, as vLLM's default backend has it. The
schemas that apply to one object are closed together: each gets the names that the others have. Alone, the two sides of
an `allOf` would forbid each other's properties. Where two of them describe one property, nothing below it is closed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

_LAST = (1 << 63) - 1024  # the last double below 2^63
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NUMBERS = (
    *("multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_ITEMS = ("items", "prefixItems", "additionalItems")
_CHOICES = ("anyOf", "oneOf")
_UNREAD = ("default", "examples")  # which may hold any number
_MAX_SCHEMAS = 50_000  # llguidance's own limit


class SchemaError(ValueError):
    """A schema that cannot be followed exactly. The message is for the client."""


class _Names(NamedTuple):
    """What schemas say of the parts of the value to which they apply."""

    properties: tuple[str, ...] = ()
    """In the order in which they are written."""
    patterns: tuple[str, ...] = ()
    described: frozenset[str] = frozenset()
    """Properties that have a schema; others are only required."""
    describes_all: bool = False
    """Every property has a schema, or a value."""
    describes_items: bool = False
    is_open: bool = False
    """They say themselves what other properties may be."""
    least: int = 0
    """Properties that the object must have."""

    @classmethod
    def of(cls, several: Iterable[_Names]) -> _Names:
        """Return what several schemas of one value say together."""
        every = list(several)
        return cls(
            tuple(dict.fromkeys(name for each in every for name in each.properties)),
            tuple(dict.fromkeys(name for each in every for name in each.patterns)),
            frozenset().union(*(each.described for each in every)),
            any(each.describes_all for each in every),
            any(each.describes_items for each in every),
            any(each.is_open for each in every),
            max(each.least for each in every),
        )

    def describe(self, keyword: str, name: str) -> bool:
        """Return whether they describe a part of the value, too, of which another schema's keyword has the schema."""
        if keyword in _ITEMS:
            return self.describes_items
        named = name in self.described if keyword == "properties" else bool(self.described)
        return named or self.describes_all or bool(self.patterns)


_NOTHING = _Names()
_Place = tuple[str, int | None]
_OWN: _Place = ("", None)


def prepared(schema: dict[str, Any], *, closes: bool) -> dict[str, Any]:
    """Return the schema that llguidance follows exactly. closes: without properties that it does not name.

    Raises SchemaError for a number that it would change. Schemas with anchors or bases inside are not closed.
    """
    text = json.dumps(schema)
    has_bases = text.count('"$id":') > ("$id" in schema) or '"$anchor":' in text
    preparation = _Preparation(schema, closes and not has_bases)
    made: dict[str, Any] = preparation.schema(schema, _NOTHING)
    return made | {"$defs": _dict(made, "$defs") | preparation.variants} if preparation.variants else made


class _Preparation:
    """The preparation of one schema.

    variants: definitions for references that stand beside other schemas of the same value.
    """

    def __init__(self, root: dict[str, Any], closes: bool) -> None:
        self.variants: dict[str, Any] = {}
        self._root, self._closes = root, closes
        self._num_schemas = 0
        self._names_of: dict[int, _Names] = {}
        self._variant_of: dict[tuple[str, _Names | None], str] = {}

    def schema(self, given: Any, around: _Names | None) -> Any:
        """Return a schema. around: what others of the same value say; None leaves this one and all below it open."""
        if not isinstance(given, dict):
            return given
        self._num_schemas += 1
        if self._num_schemas > _MAX_SCHEMAS:
            raise SchemaError(f"it has more than {_MAX_SCHEMAS:,} schemas, with those that references repeat")
        parts = self._parts(given)

        def beside(place: _Place) -> _Names | None:
            others = [names for other, names in parts.items() if other != place]
            return None if around is None else _Names.of([around, *others])

        made: dict[str, Any] = {}
        for keyword, value in given.items():
            if keyword == "$ref":
                made[keyword] = self._reference(value, beside((keyword, None)))
            elif keyword == "allOf" and isinstance(value, list):
                made[keyword] = [self.schema(part, beside((keyword, i))) for i, part in enumerate(value)]
            elif keyword in _CHOICES and isinstance(value, list):
                made[keyword] = [self.schema(part, beside((keyword, None))) for part in value]
            elif keyword not in _UNREAD:
                made[keyword] = self._value(keyword, value, given, beside(_OWN))
        choices = [parts[keyword, None] for keyword in _CHOICES if (keyword, None) in parts]
        if self._closes and around is not None and not any(each.patterns for each in choices):
            _close(made, given, _Names.of([around, *parts.values()]))
        return made

    def _value(self, keyword: str, value: Any, given: dict[str, Any], beside: _Names | None) -> Any:
        """Return a keyword's value. beside: what other schemas of the same value say."""
        by_name = ("properties", "patternProperties")
        is_twice = keyword in by_name and all(_dict(given, each) for each in by_name)  # which may describe the same

        def part(schema: Any, name: str = "") -> Any:
            is_shared = beside is None or beside.describe(keyword, name) or is_twice
            return self.schema(schema, None if is_shared else _NOTHING)

        match keyword, value:
            case (("$defs" | "definitions"), dict()):  # their names are no keywords
                return {name: self.schema(schema, _NOTHING) for name, schema in value.items()}
            case (("properties" | "patternProperties"), dict()):
                return {name: part(schema, name) for name, schema in value.items()}
            case (("items" | "prefixItems" | "additionalItems"), list()):
                return [part(schema) for schema in value]
            case (("const" | "enum"), _):
                return _exact_value(keyword, value)
            case (("additionalProperties" | "items" | "additionalItems"), dict()):
                return part(value)
            case _, dict():
                return self.schema(value, _NOTHING)
        if keyword in _LOWER or keyword in _UPPER:
            return _bound(keyword, value, is_integer=given.get("type") == "integer")
        return _exact(keyword, value) if keyword in _NUMBERS else value

    def _reference(self, reference: Any, beside: _Names | None) -> Any:
        """Return a reference, to a variant of its definition if other schemas stand beside it."""
        if not self._closes or beside == _NOTHING or not isinstance(target := self._target(reference), dict):
            return reference
        key = (reference, beside)
        if key not in self._variant_of:
            name = f"closed-{len(self._variant_of)}"
            while name in _dict(self._root, "$defs"):
                name += "-"
            self._variant_of[key] = name
            self.variants[name] = self.schema(target, beside)
        return f"#/$defs/{self._variant_of[key]}"

    def _target(self, reference: Any) -> Any:
        """Return what a reference into this schema means; None if it is another one, or means nothing."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: Any = self._root
        for part in unquote(reference).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _parts(self, given: dict[str, Any]) -> dict[_Place, _Names]:
        """Return what a schema's own keywords say, and each of those with schemas of the same value, in their order."""
        parts: dict[_Place, _Names] = {}
        values = [given["const"]] if "const" in given else given.get("enum")
        if isinstance(values, list) and any(isinstance(value, dict | list) for value in values):
            parts["enum", None] = _Names(describes_all=True, describes_items=True, is_open=True)
        for keyword, value in given.items():
            if keyword == "properties":
                parts[_OWN] = _own_names(given)
            elif keyword == "$ref":
                parts[keyword, None] = self._names(self._target(value))
            elif keyword == "allOf" and isinstance(value, list):
                parts |= {(keyword, place): self._names(schema) for place, schema in enumerate(value)}
            elif keyword in _CHOICES and isinstance(value, list):
                parts[keyword, None] = _Names.of([_NOTHING, *map(self._names, value)])
        return {**parts, _OWN: _own_names(given)}

    def _names(self, schema: Any) -> _Names:
        if not isinstance(schema, dict):
            return _NOTHING
        if id(schema) not in self._names_of:
            self._names_of[id(schema)] = _NOTHING  # in a circle of references
            self._names_of[id(schema)] = _Names.of(self._parts(schema).values())
        return self._names_of[id(schema)]


def _own_names(given: dict[str, Any]) -> _Names:
    described, least = _dict(given, "properties"), given.get("minProperties")
    required = given["required"] if isinstance(given.get("required"), list) else []
    return _Names(
        properties=tuple(dict.fromkeys([*described, *(name for name in required if isinstance(name, str))])),
        patterns=tuple(_dict(given, "patternProperties")),
        described=frozenset(described),
        describes_all=bool(_dict(given, "additionalProperties")),
        describes_items=any(keyword in given for keyword in _ITEMS),
        is_open="additionalProperties" in given or "unevaluatedProperties" in given,
        least=least if isinstance(least, int) else 0,
    )


def _dict(given: dict[str, Any], keyword: str) -> dict[str, Any]:
    return value if isinstance(value := given.get(keyword), dict) else {}


def _close(made: dict[str, Any], given: dict[str, Any], every: _Names) -> None:
    """Let an object have no properties but those that the schemas of the same value name, if it names some itself."""
    is_enough = every.least <= len(every.properties) or every.patterns
    names_some = any(isinstance(given.get(keyword), dict) for keyword in ("properties", "patternProperties"))
    if every.is_open or not is_enough or not names_some:
        return
    for keyword, names in (("properties", every.properties), ("patternProperties", every.patterns)):
        if names:
            own = _dict(made, keyword)  # first, so that answers keep the order in which properties are written
            made[keyword] = own | {name: True for name in names if name not in own}
    made["additionalProperties"] = False


def _exact_value(keyword: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_exact_value(keyword, item) for item in value]
    if isinstance(value, dict):
        return {name: _exact_value(keyword, item) for name, item in value.items()}
    return _exact(keyword, value)


def _exact(keyword: str, value: Any) -> Any:
    """Return a number that llguidance does not change, and any value that is no number. Raises SchemaError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    instead = ", or a string" if keyword in ("const", "enum") else ""
    if value != value:
        raise SchemaError(f"{keyword}: {value} is no number")
    if not abs(value) < 1 << 63:
        raise SchemaError(f"{keyword}: {value} is beyond 64 bits; write a number closer to 0{instead}")
    exact = int(value) if isinstance(value, float) and value.is_integer() else value
    if exact != (int(float(exact)) if isinstance(exact, int) else _as_read(exact)):
        told = f"{keyword}: {value} has more digits than can be followed exactly"
        raise SchemaError(f"{told}; write fewer digits{instead}")
    return exact


def _as_read(value: float) -> float:
    """Return what serde_json reads where a number stands: its digits, times or through a power of ten."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    read = float(int("".join(map(str, digits))))
    while exponent < -308:
        read, exponent = read / 1e308, exponent + 308
    power = float(f"1e{abs(exponent)}")
    return (-1 if sign else 1) * (read * power if exponent > 0 else read / power)


def _bound(keyword: str, value: Any, *, is_integer: bool) -> Any:
    """Return a bound that llguidance follows exactly, and the draft-4 values of exclusive ones. Raises SchemaError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    is_lower = keyword in _LOWER
    if abs(value) > _LAST:
        if (value < 0) != is_lower:
            raise SchemaError(f"{keyword}: {value} leaves numbers beyond 64 bits only; write a number closer to 0")
        if is_integer and not is_lower and value >= (1 << 63) - (keyword == "maximum"):
            return (1 << 63) - (keyword == "maximum")  # which it cuts to 2^63 - 1
        return -_LAST if is_lower else _LAST
    exact = _exact(keyword, value)
    inclusive = exact + (1 if is_lower else -1) if keyword.startswith("exclusive") and isinstance(exact, int) else exact
    if isinstance(inclusive, int) and inclusive != int(float(inclusive)):
        raise SchemaError(f"{keyword}: with {value} integers have more digits than can be followed exactly")
    return exact
