"""The ways to constrain an answer (schema, regular expression, grammar) as vLLM's one field."""

from collections.abc import Mapping
from typing import Any

from lmi_vllm.errors import PayloadError


def structured_outputs(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return vLLM's structured-output constraint from whichever spelling the request uses.

    Raises:
        PayloadError: more than one is used, or one is not of its form.
    """
    older = {
        "json": given.get("guided_json"),
        "regex": given.get("guided_regex"),
        "choice": given.get("guided_choice"),
        "grammar": given.get("guided_grammar"),
    }
    found: list[dict[str, Any]] = [
        {kind: value} for kind, value in older.items() if value is not None
    ]
    if given.get("structured_outputs") is not None:
        found.append(given["structured_outputs"])
    if given.get("grammar") is not None:
        found.append(_tgi_grammar(given["grammar"]))
    if given.get("response_format") is not None:
        found += _response_format(given["response_format"])
    if len(found) > 1:
        raise PayloadError(
            "parameters: only one of structured_outputs, response_format, grammar and guided_* "
            "may be given"
        )
    return found[0] if found else None


def _tgi_grammar(grammar: Mapping[str, Any]) -> dict[str, Any]:
    kind, value = grammar.get("type"), grammar.get("value")
    if kind not in ("json", "json_object", "regex", "json_schema") or value is None:
        raise PayloadError('parameters.grammar: expected {"type": "json" or "regex", "value": ...}')
    if kind == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]  # TGI 3: {"name": ..., "schema": {...}}
    return {"regex" if kind == "regex" else "json": value}


def _response_format(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = wanted.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [{"json_object": True}]
    schema = wanted.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict) and "schema" in schema:
        return [{"json": schema["schema"]}]
    raise PayloadError(
        "parameters.response_format: type must be text, json_object or json_schema (with "
        "json_schema.schema)"
    )
