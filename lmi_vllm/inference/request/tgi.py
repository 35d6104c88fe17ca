"""Bodies of TGI's clients on OpenAI's routes, as TGI reads them (`tgi_compat`)."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.messages import GENERATE, ServingProfile

# What TGI's own examples and huggingface_hub call the model that is served, whatever it is.
TGI_NAMES: Final = ("tgi", "dummy")
FORMATS: Final = ("json", "json_object", "json_schema", "regex")
_PROMPT_ENDS: Final = frozenset({"continue_final_message", "add_generation_prompt"})
_CHOICES: Final = ("auto", "none", "required")  # what is no function's name in `tool_choice`


def with_tgi_meaning(
    payload: dict[str, Any], profile: ServingProfile, is_adapter: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the payload without nulls, which TGI takes for missing, and with a served model.

    Parameters beside `inputs` are read so anyway.
    """
    if "messages" not in payload and "prompt" not in payload:
        return payload
    found = _without_nulls(payload)
    if isinstance(messages := found.get("messages"), list):
        found["messages"] = [_message(one) if isinstance(one, dict) else one for one in messages]
        if profile.task == GENERATE and _PROMPT_ENDS.isdisjoint(found):
            found |= _continuation(found["messages"])
    model, served = found.get("model"), profile.served_names
    if model in TGI_NAMES and model not in served and not is_adapter(model):
        found["model"] = served[0]
    return _with_tools(found)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without nulls; the arguments of calls are text, as vLLM's templates read."""
    found = _without_nulls(message)
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_changed(call, "function", _with_text_arguments) for call in calls]
    return found


def _with_text_arguments(function: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(arguments := function.get("arguments"), dict):
        return function
    return {**function, "arguments": orjson.dumps(arguments).decode()}


def _continuation(messages: list[Any]) -> dict[str, bool]:
    """Return the fields that let the answer go on with the last message, if an assistant wrote it.

    TGI does so for every chat. vLLM would let the assistant begin a new message.
    """
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or last.get("tool_calls"):
        return {}
    content = last.get("content")
    if isinstance(content, list):  # of parts; the text goes on after the last one
        part = content[-1] if content else None
        content = part.get("text") if isinstance(part, dict) else None
    is_text = isinstance(content, str) and content.strip()
    return {"continue_final_message": True, "add_generation_prompt": False} if is_text else {}


def _with_tools(found: dict[str, Any]) -> dict[str, Any]:
    """Return a chat with TGI's forms of tools in OpenAI's: a name as choice, none as a list."""
    choice, tools = found.get("tool_choice"), found.get("tools")
    if isinstance(choice, str) and choice not in _CHOICES:
        found["tool_choice"] = {"type": "function", "function": {"name": choice}}
    elif choice in ("auto", "required") and not tools:  # vLLM wants tools beside these
        del found["tool_choice"]
    if isinstance(tools, list):
        found["tools"] = [_changed(tool, "function", _with_parameters) for tool in tools]
        if not tools:
            del found["tools"]
    return found


def _with_parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's function with its schema under OpenAI's name, not TGI's `arguments`."""
    if "parameters" in function or not isinstance(function.get("arguments"), dict):
        return function
    rest = {name: value for name, value in function.items() if name != "arguments"}
    return {**rest, "parameters": function["arguments"]}


def _changed(whole: Any, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return an object with the object under `name` changed; anything else is vLLM's to refuse."""
    if not isinstance(whole, dict) or not isinstance(part := whole.get(name), dict):
        return whole
    return {**whole, name: change(part)}


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
