"""What nothing matches is refused; what something may match is not."""

from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.features.grammar_trials.contradictions import check_contradictions, misplaced_anchor

NOTHING: dict[str, Any] = {
    "not anything": {"not": {}},
    "not true": {"not": True},
    "any of none": {"anyOf": []},
    "one of none": {"oneOf": []},
    "no type": {"type": []},
    "no value": {"enum": []},
    "false": False,
    "any of nothing": {"anyOf": [{"not": {}}, {"type": []}]},
    "all of nothing": {"allOf": [{"type": "string"}, {"not": {}}]},
    "a property": {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
    "an item": {"type": "array", "items": {"type": []}, "minItems": 1},
}
NOTHING |= {
    "a value that is not allowed": {"enum": ["a", "b"], "const": "c"},
    "a value of another type": {"type": "string", "const": 1},
    "values of another type": {"type": ["integer", "null"], "enum": ["a", 1.5, True]},
    "true is no number": {"type": "number", "const": True},
    "not its type": {"type": "string", "not": {"type": "string"}},
    "not its types": {"type": ["integer", "null"], "not": {"type": ["number", "null"]}},
    "not its value": {"const": 1, "not": {"enum": [1, 2]}},
    "not the type of its values": {"enum": ["a", "b"], "not": {"type": "string"}},
    "within a property": {
        "type": "object", "required": ["a"], "properties": {"a": {"type": "null", "enum": ["x"]}}
    },
}  # fmt: skip
SOMETHING: dict[str, Any] = {
    "anything": {},
    "true": True,
    "not a text": {"not": {"type": "string"}},
    "one of two": {"anyOf": [{"not": {}}, {"type": "string"}]},
    "no property": {"type": "object", "properties": {"a": {"not": {}}}},
    "no item": {"type": "array", "items": {"not": {}}},
    "names": {"type": "object", "properties": {"not": {}, "anyOf": {"type": "array"}}},
    "values": {"enum": [[], {"not": {}}], "default": {"anyOf": []}},
    "itself": {"$ref": "#"},
    "a value that is allowed": {"type": "number", "enum": [1, 2.5], "const": 1},
    "an integral number": {"type": "integer", "const": 2.0},
    "a null among texts": {"type": "string", "enum": ["a", None]},
    "an unknown type": {"type": "any", "const": 1},
    "not some of its types": {"type": ["string", "null"], "not": {"type": "null"}},
    "not all of its numbers": {"type": "number", "not": {"type": "integer"}},
    "not one of its values": {"enum": [1, 2], "not": {"const": 1}},
    "not one of its strings": {"type": "string", "not": {"const": "a"}},
    "not of more than a type": {"type": "string", "not": {"type": "string", "maxLength": 3}},
    "not what is true": {"enum": [1], "not": {"const": True}},
    "wrong kinds": {"anyOf": 1, "required": 2, "properties": [], "allOf": {}},
}


def check(**constraint: Any) -> None:
    """Check a constraint in vLLM's form."""
    check_contradictions(SimpleNamespace(**{"json": None, "regex": None, **constraint}))


@pytest.mark.parametrize("schema", NOTHING.values(), ids=NOTHING)
def test_schema_that_nothing_matches_is_refused(schema: Any) -> None:
    """The part is named."""
    with pytest.raises(ValueError, match=r"no text matches it: (false|\"\w+\")"):
        check(json=schema)


@pytest.mark.parametrize("schema", SOMETHING.values(), ids=SOMETHING)
def test_schema_that_something_may_match_is_served(schema: Any) -> None:
    """Names of properties and values are no keywords."""
    check(json=schema)


@pytest.mark.parametrize(
    "pattern", ["a^b", "a$b", "x(^a)", "(a|b^c)", "(a$)+b", "[a-c]{2}^", "$a", r"\^a^"]
)
def test_anchor_in_the_middle_is_refused(pattern: str) -> None:
    """In a regular expression, and wherever a schema has one."""
    assert misplaced_anchor(pattern)
    inner = {"type": "string", "pattern": pattern}
    for constraint in (
        {"regex": pattern},
        {"json": inner},
        {"json": {"type": "object", "properties": {"a": inner}}},
        {"json": {"anyOf": [{"items": inner}]}},
        {"json": {"patternProperties": {pattern: {}}}},
        {"json": {"$defs": {"a": inner}}},
    ):
        with pytest.raises(ValueError, match="where other letters stand before or after"):
            check(**constraint)


@pytest.mark.parametrize(
    "pattern",
    [
        "^ab$",
        "(^a|b$)",
        "(^$|^a)",
        "^(^a)$",
        "a*^b",
        "a$b?",
        r"a\^b",
        "[$^]a",
        "a[^b]",
        "(",
        "(?<a>^b)",
    ],
)
def test_anchor_that_may_match_is_served(pattern: str) -> None:
    """At an end, after nothing, as a letter; what Python does not read is not judged."""
    check(regex=pattern, json={"type": "string", "pattern": pattern})
