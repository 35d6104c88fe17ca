"""Bodies of TGI's clients on OpenAI's routes, as TGI reads them (`tgi_compat`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from lmi_vllm.errors import PayloadError

# What TGI's own examples and huggingface_hub call the model that is served, whatever it is.
TGI_NAMES: Final = ("tgi", "dummy")
FORMATS: Final = ("json", "json_object", "json_schema", "regex")
_CHOICES: Final = ("auto", "none", "required")  # what is no function's name in `tool_choice`


def with_tgi_meaning(
    payload: dict[str, Any], served: Sequence[str], is_adapter: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the payload without nulls, which TGI takes for missing, and with a served model.

    Parameters beside `inputs` are read so anyway.
    """
    if "messages" not in payload and "prompt" not in payload:
        return payload
    found = _without_nulls(payload)
    if isinstance(messages := found.get("messages"), list):
        found["messages"] = [
            _without_nulls(one) if isinstance(one, dict) else one for one in messages
        ]
    model = found.get("model")
    if model in TGI_NAMES and model not in served and not is_adapter(model):
        found["model"] = served[0]
    if isinstance(choice := found.get("tool_choice"), str) and choice not in _CHOICES:
        found["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return found


def with_openai_format(body: dict[str, Any], *, is_tgi: bool) -> dict[str, Any]:
    """Return an OpenAI body whose `response_format` has OpenAI's form, where it has TGI's.

    vLLM drops the schema beside `json_object`, so that is read in every mode. It refuses the types
    that only TGI has.

    Raises:
        PayloadError: it has both forms, is beside another constraint, or is none of TGI's.
    """
    wanted = body.get("response_format")
    if not isinstance(wanted, dict) or (value := wanted.get("value")) is None:
        return body
    kind = wanted.get("type")
    if kind not in FORMATS or not (is_tgi or kind == "json_object"):
        return body  # vLLM refuses it
    for other, name in ((wanted, "json_schema"), (body, "structured_outputs")):
        if other.get(name) is not None:
            raise PayloadError(f"response_format: only one of value and {name} may be given")
    if kind == "regex":
        if not isinstance(value, str):
            raise PayloadError("response_format.value: expected a regular expression as text")
        rest = {name: body[name] for name in body if name != "response_format"}
        return {**rest, "structured_outputs": {"regex": value}}
    schema = {"name": "answer", "schema": _schema_of(value, kind)}
    return {**body, "response_format": {"type": "json_schema", "json_schema": schema}}


def _schema_of(value: Any, kind: str) -> Mapping[str, Any]:
    """Return the JSON schema that TGI reads in `value`: an object, or its text."""
    if kind == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise PayloadError(f"response_format.value: no JSON schema: {error}") from None
    if not isinstance(value, dict):
        raise PayloadError("response_format.value: expected a JSON schema, an object or its text")
    return value


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
