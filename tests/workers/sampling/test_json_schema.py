"""JSON schemas before llguidance gets them: numbers to the last digit, and objects without unnamed properties."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.support.json_schemas import WRITTEN, check_valid, completed, suite
from workers.sampling import grammar as module
from workers.sampling.grammar import GrammarError, TokenTable, grammar_text

BUNDLED = str(Path(module.__file__).parents[2] / "secateur" / "bundled" / "target")
TABLE = TokenTable(BUNDLED, 2048, (0, 2))
TOKENIZER = Tokenizer(BUNDLED)
TEXTS = [TOKENIZER.decode([token]) for token in range(2048)]
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def allows(schema: dict[str, Any], text: str, **settings: Any) -> bool:
    matcher = TABLE.compile(grammar_text("json", schema, whitespace="none", **settings))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def refusal(schema: dict[str, Any], **settings: Any) -> str | None:
    try:
        TABLE.compile(grammar_text("json", schema, whitespace="none", **settings))
    except GrammarError as error:
        return str(error)
    return None


# ---- numbers


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 2**53 - 1}, [2**53 - 1], [2**53]),
        ({"enum": [1234567890123456768, [5.0], 1.5e-9]}, [1234567890123456768, [5], "0.0000000015"], [1]),
        (INT64, [0, 2**63 - 1, -(2**63) + 1024, 1 - 2**53], [2**63, -(2**63) - 1, 10**19]),
        ({**INT64, "exclusiveMaximum": 2**63}, [2**63 - 1], [2**63]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**64}, [2**63 - 1], [2**64, -1]),
        ({"type": "number", "maximum": 1e300}, [0, -1, 2**62, "0.5"], [10**19]),
        ({"type": "integer", "minimum": -(2**53), "exclusiveMaximum": 2**53}, [-(2**53), 2**53 - 1], [2**53]),
        ({"type": "string", "minLength": 2.0, "default": 2**70, "examples": [1e400]}, ['"ab"'], ['"a"']),
    ],
)
def test_a_number_is_followed_to_its_last_digit(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert allows(schema, value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))), value
    for value in wrong:
        assert not allows(schema, str(value)), value


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"const": 9007199254740993}, "const: 9007199254740993 has more digits than can be followed exactly"),
        ({"const": {"a": [-9007199254740993]}}, "const: -9007199254740993 has more digits"),
        ({"enum": ["x", 1234567890123456789]}, "enum: 1234567890123456789 has more digits"),
        ({"properties": {"a": {"const": 123456789.12345679}}}, "const: 123456789.12345679 has more digits"),
        ({"const": 2**64}, "const: 18446744073709551616 is beyond 64 bits; write a number closer to 0, or a string"),
        ({"const": 1e400}, "const: inf is beyond 64 bits"),
        ({"enum": [float("nan")]}, "enum: nan is no number"),
        ({"type": "integer", "maximum": 10**18 - 1}, "maximum: 999999999999999999 has more digits"),
        ({"type": "number", "minimum": 123456789.12345679}, "minimum: 123456789.12345679 has more digits"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum: with 9007199254740992 integers have more"),
        ({"type": "integer", "minimum": 10**30}, "leaves numbers beyond 64 bits only; write a number closer to 0"),
        ({"type": "integer", "minimum": 2 * 10**18}, "minimum, maximum: numbers between these bounds cannot be"),
        ({"type": "number", "multipleOf": 123456789.12345679}, "multipleOf: 123456789.12345679 has more digits"),
        ({"type": "array", "maxItems": 2**64}, "maxItems: 18446744073709551616 is beyond 64 bits"),
    ],
)
def test_a_number_that_would_change_is_refused_by_its_keyword(schema: dict[str, Any], told: str) -> None:
    assert told in (refusal(schema) or "")


def test_numbers_of_any_length_are_answered_exactly_or_refused() -> None:
    rng, num_exact = random.Random(0), 0
    for _ in range(300):
        digits = rng.randint(1, 19)
        value = rng.choice((-1, 1)) * rng.randrange(10**digits)
        number: Any = value if rng.random() < 0.5 else float(f"{value}e-{rng.randint(1, 30)}")
        if (told := refusal({"const": number})) is not None:
            assert told.startswith("const: ")
            continue
        [text] = {TOKENIZER.decode(completed(TABLE, grammar_text("json", {"const": number}), [], TEXTS))}
        assert json.loads(text) == number
        num_exact += 1
    assert num_exact > 200


# ---- objects

A, B = {"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object", "properties": {"b": {"const": 2}}}
BASE = {"type": "object", "properties": {"id": {"const": 0}}, "required": ["id"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "claws": {"const": 4}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "tail": {"const": 1}}, "required": ["kind"]}
TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, ["{}", '{"a":1}'], ['{"z":1}', '{"a":1,"z":1}']),
        ({"type": "object"}, ["{}", '{"z":1}'], []),
        ({"type": "object", "properties": {}}, ["{}"], ['{"z":1}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"z":1}'], []),
        ({**A, "additionalProperties": {"const": 3}}, ['{"a":1,"z":3}'], ['{"z":4}']),
        ({**A, "required": ["q"]}, ['{"q":5}', '{"a":1,"q":5}'], ['{"q":5,"z":1}', "{}"]),
        ({**A, "minProperties": 2, "required": ["a"]}, ['{"a":1,"z":1}'], ['{"a":1}']),
        ({"patternProperties": {"^n_": {"const": 1}}}, ['{"n_a":1}'], ['{"a":1}', '{"n_a":2}']),
        ({"type": "array", "items": A}, ['[{"a":1},{}]'], ['[{"z":1}]']),
        ({"type": "array", "prefixItems": [A]}, ['[{"a":1}]'], ['[{"z":1}]']),
        ({"type": "object", "properties": {"o": A}}, ['{"o":{"a":1}}'], ['{"o":{"z":1}}']),
        ({"type": "object", "additionalProperties": A}, ['{"o":{"a":1}}'], ['{"o":{"z":1}}']),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"a":1}'], ['{"z":1}']),
        ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": A}}}, ['{"a":1}'], ['{"z":1}']),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}}, ['{"a":1}'], ['{"z":1}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":2}', "{}"], ['{"a":1,"b":2,"z":1}']),
        ({**A, "allOf": [B]}, ['{"a":1,"b":2}', "{}"], ['{"a":1,"b":2,"z":1}']),
        ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}}, ['{"a":1,"b":2}'], ['{"a":1,"z":1}']),
        ({**B, "$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"b":2,"a":1}', '{"b":2}'], ['{"b":2,"z":1}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":2}'], ['{"a":1,"b":2}', '{"z":1}']),
        ({**BASE, "anyOf": [A, B]}, ['{"id":0,"a":1}', '{"id":0,"b":2}'], ['{"id":0,"a":1,"b":2}', '{"id":0,"z":1}']),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":7}'], ['{"a":1,"z":1}']),
        (
            {"allOf": [BASE, {"oneOf": [CAT, DOG]}]},
            ['{"id":0,"kind":"cat","claws":4}', '{"id":0,"kind":"dog"}'],
            ['{"id":0,"kind":"cat","tail":1}', '{"id":0,"kind":"dog","z":1}', '{"kind":"cat"}'],
        ),
        ({"oneOf": [CAT, DOG]}, ['{"kind":"cat","claws":4}'], ['{"kind":"cat","tail":1}', '{"kind":"cat","z":0}']),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a":1,"b":2,"z":1}'], ['{"a":2}']),
        ({"anyOf": [{**A, "additionalProperties": True}, B]}, ['{"a":1,"z":1}', '{"b":2}'], []),
        ({**A, "enum": [{"a": 1, "b": {"c": 2}}]}, ['{"a":1,"b":{"c":2}}'], ["{}"]),
        ({"properties": {"o": A}, "const": {"o": {"b": 2}}}, ['{"o":{"b":2}}'], ["{}"]),
        (
            {"allOf": [{"properties": {"o": A}}, {"properties": {"o": {**B, "required": ["b"]}}, "required": ["o"]}]},
            ['{"o":{"a":1,"b":2}}'],
            ["{}", '{"o":{}}', '{"z":1,"o":{"b":2}}'],
        ),
        (
            {"properties": {"n_o": A}, "patternProperties": {"^n_": {**B, "required": ["b"]}}, "required": ["n_o"]},
            ['{"n_o":{"a":1,"b":2}}'],
            ["{}"],
        ),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, ['{"kids":[{"kids":[]}]}'], ['{"kids":[{"z":1}]}']),
        (
            {"allOf": [{"$ref": "#/$defs/tree"}, BASE], "$defs": {"tree": TREE, "closed-0": {}}},
            ['{"kids":[{"kids":[]}],"id":0}'],
            ['{"kids":[{"id":0}],"id":0}', '{"kids":[],"id":0,"z":1}'],
        ),
        (
            {"allOf": [{"type": "array", "items": A}, {"items": {**B, "required": ["b"]}, "minItems": 1}]},
            ['[{"a":1,"b":2}]'],
            ["[]", "[{}]"],
        ),
    ],
)
def test_objects_have_the_properties_that_their_schemas_name(schema: Any, right: list[str], wrong: list[str]) -> None:
    for text in right:
        check_valid(text, schema)
        assert allows(schema, text), text
    assert not [text for text in wrong if allows(schema, text)]


def test_open_objects_have_any_property() -> None:
    for text in ('{"z":1}', '{"a":1,"z":[]}'):
        assert allows(A, text, closes_objects=False) and not allows(A, text)


def test_closing_refuses_no_schema_that_is_understood_open() -> None:
    for name, schema in (WRITTEN | suite()).items():
        assert (refusal(schema) is None) == (refusal(schema, closes_objects=False) is None), name


def random_object(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of objects that are described in several places."""
    schema: dict[str, Any] = {}
    names = rng.sample("abcd", k=rng.randint(0, 2))
    if names:
        inner = [random_object(rng, depth - 1) if depth and rng.random() < 0.4 else {"type": "null"} for _ in names]
        schema["properties"] = dict(zip(names, inner, strict=True))
        schema["required"] = rng.sample("abcd", k=rng.randint(0, 1))
    schema["type"] = "object"
    for keyword in rng.sample(("allOf", "anyOf", "$ref"), k=rng.randint(0, 2)) if depth else ():
        if keyword == "$ref":
            schema["$ref"] = rng.choice(("#/$defs/x", "#/$defs/y"))
        else:
            schema[keyword] = [random_object(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.1:
        schema["additionalProperties"] = rng.choice((True, {"type": "null"}))
    return schema


def test_answers_to_closed_schemas_are_valid_by_the_schema_as_it_was_written() -> None:
    rng, num_valid = random.Random(1), 0
    for _ in range(120):
        schema = random_object(rng)
        schema["$defs"] = {"x": random_object(rng, 1), "y": random_object(rng, 0)}
        told = refusal(schema)
        assert (told is None) == (refusal(schema, closes_objects=False) is None), (schema, told)
        if told is None:
            grammar = grammar_text("json", schema, whitespace="none")
            check_valid(TOKENIZER.decode(completed(TABLE, grammar, [], TEXTS)), schema)
            num_valid += 1
    assert num_valid > 60
