"""Schemas and patterns that nothing matches, and that a library takes for others.

xgrammar reads `{"not": {}}`, `{"anyOf": []}` and `{"type": []}` as any JSON. It leaves out an
anchor in the middle of a pattern: `a^b` becomes `ab`. Of `const`, `enum`, `type` and `not` it reads
one, and leaves out the others. An answer would match what nothing does. Only what is certain is
refused: anchors that change nothing, as in `(^a|b$)`, are served, and so is a `not` of some values.
"""

import importlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType, NoneType
from typing import Any, Final

_PARTS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES: Final = ("items", "additionalProperties", "propertyNames", "contains")
_KINDS: Final[Mapping[str, tuple[type, ...]]] = MappingProxyType(
    {
        "string": (str,), "integer": (int, float), "number": (int, float), "boolean": (bool,),
        "null": (NoneType,), "array": (list,), "object": (dict,),
    }
)  # fmt: skip
_NOTHING: Final = "no text matches it: {}"
_GROUPS: Final = ("SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT")


def check_contradictions(outputs: Any) -> None:
    """Check the schema and the patterns of a constraint in vLLM's form.

    Raises:
        ValueError: no text matches it, or a part that an answer may choose.
    """
    patterns = [] if outputs.regex is None else [outputs.regex]
    if outputs.json is not None:
        schema = json.loads(outputs.json) if isinstance(outputs.json, str) else outputs.json
        if contradiction := _contradiction(schema):
            raise ValueError(_NOTHING.format(contradiction))
        patterns += _patterns(schema)
    for pattern in patterns:
        if anchor := misplaced_anchor(pattern):
            raise ValueError(
                f"nothing matches {anchor} where other letters stand before or after it, in the "
                f"pattern {pattern}: write {re.escape(anchor)} for the letter"
            )


def misplaced_anchor(pattern: str) -> str:
    """Return the anchor of a regular expression at a place where it never matches; "" if none is.

    Python reads it. What it does not know is another's to judge.
    """
    try:
        parser = importlib.import_module("re._parser")
        with warnings.catch_warnings():  # of syntax that Python will read in another way
            warnings.simplefilter("ignore")
            return _anchor(parser.parse(pattern), 0, 0)
    except (ImportError, re.error, OverflowError, RecursionError):
        return ""


def _anchor(parts: Any, before: int, after: int) -> str:
    """Look for one in a sequence that has so many letters before and after it at least."""
    left, right = before, after + parts.getwidth()[0]
    for index, (kind, value) in enumerate(parts):
        width, name = parts[index : index + 1].getwidth()[0], str(kind)
        right -= width
        if name == "AT":
            if str(value) == "AT_BEGINNING" and left:
                return "^"
            if str(value) == "AT_END" and right:
                return "$"
        inner = value[1] if name == "BRANCH" else value[-1:] if name in _GROUPS else ()
        for part in inner:
            if found := _anchor(part, left, right):
                return found
        left += width
    return ""


def _contradiction(schema: Any) -> str:
    """Return the part of a schema for which nothing matches all of it; "" if something may."""
    if not isinstance(schema, Mapping):
        return "false" if schema is False else ""
    if "not" in schema and schema["not"] in ({}, True):
        return '"not" of anything'
    for name in ("type", "enum", "anyOf", "oneOf"):
        if schema.get(name) == []:
            return f'"{name}": []'
    if clash := _clash(schema):
        return clash
    for name in ("anyOf", "oneOf"):
        found = [_contradiction(branch) for branch in _list(schema, name)]
        if found and all(found):
            return found[0]
    return next(filter(None, map(_contradiction, _needed(schema))), "")


def _clash(schema: Mapping[str, Any]) -> str:
    """Return what of its values and types nothing can be at once; "" if something may be."""
    values, types = _values(schema), _types(schema)
    allowed = _list(schema, "enum")
    if "const" in schema and allowed and not _is_in(schema["const"], allowed):
        return '"const" that is not in "enum"'
    if values and types and not any(_is_of(one, types) for one in values):
        return f'"{"const" if "const" in schema else "enum"}" without a value of its "type"'
    left_out = schema.get("not")
    if not isinstance(left_out, Mapping) or len(left_out) != 1:
        return ""
    out, out_types = _values(left_out), _types(left_out)
    is_out = values and all(
        _is_in(one, out) or (out_types and _is_of(one, out_types)) for one in values
    )
    if is_out or (types and types <= out_types):
        return '"not" of all that it allows'
    return ""


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _list(schema, "enum")


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return its types; none where one is unknown. A number may be an integer."""
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    if not all(isinstance(one, str) and one in _KINDS for one in types):
        return frozenset()
    return frozenset([*types, "integer"] if "number" in types else types)


def _is_of(value: Any, types: Set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and not value.is_integer():
        return "number" in types
    return any(isinstance(value, kind) for one in types for kind in _KINDS[one])


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in values)


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas that something in each value has to match."""
    yield from _list(schema, "allOf")
    known = schema.get("properties")
    if schema.get("type") == "object" and isinstance(known, Mapping):
        yield from (known.get(name) for name in _list(schema, "required") if isinstance(name, str))
    if schema.get("type") == "array" and schema.get("minItems"):
        yield schema.get("items")


def _patterns(schema: Any) -> Iterator[str]:
    """Yield the regular expressions of a schema and of those in it."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    parts = {name: schema.get(name) for name in _PARTS}
    groups = [found for found in parts.values() if isinstance(found, Mapping)]
    if parts["patternProperties"] in groups:
        yield from parts["patternProperties"]
    inner = [schema.get(name) for name in _ONES]
    inner += [one for group in groups for one in group.values()]
    inner += [one for name in _LISTS for one in _list(schema, name)]
    for one in inner:
        yield from _patterns(one)


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []
