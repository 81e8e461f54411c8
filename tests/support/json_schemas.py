"""JSON schemas for structured outputs: written, from the JSON Schema Test Suite, and random; and what is valid by them.

The Test Suite's schemas are those of draft 2020-12 and of its formats, without those that refer to other documents:
https://github.com/json-schema-org/JSON-Schema-Test-Suite, Copyright (c) 2012 Julian Berman, MIT licence.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import numpy as np
from jsonschema.validators import validator_for

from workers.sampling.grammar import TokenTable

_SUITE = Path(__file__).with_name("json-schema-test-suite.jsonl")
_SIMPLE = tuple("05a@.:-,DZ")
_CLOSING = ('"', "}", "]", '"}', '"]', "}}", "]}", "]]")


def _closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the schema of an object that has exactly these properties."""
    own = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return own | more


_POINT = _closed({"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"enum": [1, 2]}})

WRITTEN: dict[str, dict[str, Any]] = {
    # ---- scalars
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "integer from 0": {"type": "integer", "minimum": 0},
    "integer in a range": {"type": "integer", "minimum": -12, "maximum": 345},
    "integer in an open range": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 9},
    "multiple of 5": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "multiple of a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 4},
    "number": {"type": "number"},
    "number in a range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "number in an open range": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "negative number": {"type": "number", "maximum": -0.5},
    "string": {"type": "string"},
    "short string": {"type": "string", "maxLength": 6},
    "long string": {"type": "string", "minLength": 12, "maxLength": 16},
    "string of one length": {"type": "string", "minLength": 3, "maxLength": 3},
    "anchored pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern anywhere": {"type": "string", "pattern": "[0-9]{2}"},
    "pattern and length": {"type": "string", "pattern": "^[a-f]+$", "minLength": 4, "maxLength": 8},
    "pattern of a choice": {"type": "string", "pattern": "^(red|green|dark blue)$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri"},
    "enum of texts": {"enum": ["red", "green", "dark blue"]},
    "enum of texts that begin alike": {"enum": ["a", "ab", "abc", "abcd"]},
    "enum of any values": {"enum": [None, True, 1, 2.5, "one", [1, 2], {"a": None}]},
    "enum with escapes": {"enum": ['say "hi"', "a\nb", "back\\slash", "tab\t", "\u00e9\u4e16\U0001f333"]},
    "const": {"const": {"answer": 42, "why": ["because", None]}},
    "several types": {"type": ["integer", "null", "boolean"]},
    # ---- arrays
    "array of booleans": {"type": "array", "items": {"type": "boolean"}, "maxItems": 5},
    "array with a minimum": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 3, "maxItems": 6},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["a", "b"]}], "items": False},
    "whole tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 4},
    "matrix": {
        "type": "array", "minItems": 2, "maxItems": 2,
        "items": {"type": "array", "items": {"enum": [0, 1, 10]}, "minItems": 2, "maxItems": 2},
    },
    "array of objects": {"type": "array", "items": _POINT, "minItems": 1, "maxItems": 3},
    "array of any values": {"type": "array", "maxItems": 2},
    # ---- objects
    "point": _POINT,
    "empty object": {"type": "object", "additionalProperties": False},
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "additionalProperties": False,
    },
    "required beside optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "required without a schema": {"type": "object", "required": ["name"], "additionalProperties": {"type": "boolean"}},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "map with a maximum": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "map that is not empty": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    "one more than required": {
        "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": {"const": 2},
        "minProperties": 2, "maxProperties": 3,
    },
    "properties by pattern": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer", "minimum": 0, "maximum": 9}, "^s_": {"enum": ["x", "y"]}},
        "additionalProperties": False,
    },
    "names that need escapes": _closed({'a"b': {"const": 1}, "c\\d": {"const": 2}, "\u00e9\n": {"const": 3}}),
    "nested objects": _closed({"a": _closed({"b": _closed({"c": _closed({"d": {"type": "boolean"}})})})}),
    "many properties": _closed({f"field_{i}": {"type": "boolean"} for i in range(12)}),
    "any object": {"type": "object"},
    "any value": {},
    # ---- combinations and references
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}, _POINT]},
    "one of distinct types": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "tagged union": {
        "oneOf": [
            _closed({"kind": {"const": "circle"}, "radius": {"enum": [1, 2, 3]}}),
            _closed({"kind": {"const": "square"}, "side": {"enum": [4, 5]}}),
        ]
    },
    "one of that overlap": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": {"type": "boolean"}},
        ]
    },
    "definitions": {"$ref": "#/$defs/point", "$defs": {"point": _POINT}},
    "anchor": {"$ref": "#here", "$defs": {"any": {"$anchor": "here", "enum": ["there"]}}},
    "recursive list": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _closed({"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
        },
    },
    "recursive tree": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": _closed({"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}})},
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"flag": {"type": "boolean"}},
        "type": "array",
        "items": [{"$ref": "#/definitions/flag"}, {"const": 7}],
        "additionalItems": False,
        "minItems": 2,
    },
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 5,
    },
    "annotations": {"title": "A title", "description": "What it is.", "default": 1, "examples": [2], "enum": [1, 2]},
    # ---- what is refused
    "some of three properties": {
        "type": "object", "properties": {name: {"type": "null"} for name in "abc"}, "minProperties": 2,
    },
    "map with a minimum": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "null"}},
    "unique items": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3},
    "contains": {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxItems": 3},
    "property names": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
    "dependent properties": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluated properties": {"type": "object", "unevaluatedProperties": False},
}  # fmt: skip
"""Schemas by the feature that they show."""


def suite() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema Test Suite's schemas by their names."""
    rows = [json.loads(line) for line in _SUITE.read_text().splitlines()]
    return {row["name"]: row["schema"] for row in rows}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of bounded values, nested at most `depth` deep."""
    leaves = ("boolean", "null", "enum", "const", "integer", "number", "string", "pattern")
    kind = rng.choice((*leaves, "array", "array", "object", "object", "anyOf", "tuple") if depth else leaves)
    match kind:
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": [_random_value(rng, 2) for _ in range(rng.randint(1, 5))]}
        case "const":
            return {"const": _random_value(rng, 2)}
        case "integer" | "number":
            least = rng.randint(-1000, 1000) if kind == "integer" else round(rng.uniform(-10, 10), rng.randint(0, 3))
            bounds = {"minimum": least, "maximum": least + rng.choice((1, 7, 150))}
            return {"type": kind, **bounds}
        case "string":
            least = rng.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}
        case "pattern":
            parts = rng.choices(
                ("[a-z]{2,4}", "[0-9]{1,3}", "-", "(ab|ba)+?", "\\\\d", "x?", "\u00e9"), k=rng.randint(1, 3)
            )
            return {"type": "string", "pattern": "^" + "".join(parts).replace("\\\\d", "\\d") + "$"}
        case "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        case "tuple":
            items = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, len(items))}
        case "object":
            names = rng.sample(("a", "name", "two words", "\u00e9", 'q"', "x_1", "A"), k=rng.randint(0, 4))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case _:
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    match kind:
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.randint(-1000, 1000)
        case 2:
            return round(rng.uniform(-5, 5), 2)
        case 3 | 4:
            return "".join(rng.choices('abc "\\\n\u00e9\u4e16', k=rng.randint(0, 5)))
        case 5:
            return [_random_value(rng, depth - 1) for _ in range(rng.randint(0, 2))]
        case _:
            return {name: _random_value(rng, depth - 1) for name in rng.sample("abc", k=rng.randint(0, 2))}


# ---- what is valid


def _is_date(text: str) -> bool:
    """Return whether a text is a date. 29 February is allowed in every year, as llguidance has it, and so is year 0."""
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text)) and bool(date.fromisoformat(f"2024{text[4:]}"))


def _is_time(text: str) -> bool:
    is_written_so = re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)", text) is not None
    seconds = text[6:8].replace("60", "59")
    return is_written_so and bool(time.fromisoformat(text[:6] + seconds + text[8:].upper()))


def _is_date_time(text: str) -> bool:
    return text[10] in "tT" and _is_date(text[:10]) and _is_time(text[11:])


FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))
"""The formats whose check needs no other package, and those below."""


def _check(name: str, is_valid: Callable[[str], bool]) -> None:
    FORMATS.checks(name, raises=(ValueError, IndexError))(lambda value: not isinstance(value, str) or is_valid(value))


_DURATION = r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)"
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_check("date", _is_date)
_check("time", _is_time)
_check("date-time", _is_date_time)
_check("duration", lambda text: re.fullmatch(_DURATION, text) is not None)
_check("hostname", lambda text: len(text) < 254 and re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", text) is not None)
_check("uri", lambda text: re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]*", text) is not None and bool(urlsplit(text)))


def check_valid(text: str, schema: dict[str, Any]) -> None:
    """Raise if a text is not JSON that is valid by the schema."""
    own = validator_for(schema, default=jsonschema.Draft202012Validator)
    own(schema, format_checker=FORMATS).validate(json.loads(text))


def completed(
    table: TokenTable, grammar: str, tokens: Sequence[int], texts: Sequence[str], most: int = 600
) -> list[int]:
    """Return an output that was cut, with the tokens that end it as soon as possible. texts: of all tokens."""
    matcher = table.compile(grammar)
    whole = list(tokens)
    assert matcher.try_consume_tokens(whole) == len(whole), "the output does not match"
    rng = random.Random(0)
    for _ in range(most):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits) if token < table.vocab_size]
        if not allowed or set(allowed) & set(table.end_token_ids):
            return whole
        favoured = [[token for token in allowed if texts[token] in some] for some in (_CLOSING, _SIMPLE)]
        some = rng.choices([*favoured, allowed], [8, 4, 1])[0]
        whole.append(rng.choice(some or allowed))
        assert matcher.try_consume_tokens(whole[-1:]) == 1
    raise AssertionError("the output does not come to an end")
