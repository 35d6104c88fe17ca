"""Requests in vLLM's own request models, for an engine that is not vLLM's.

A field that the Transformers engine does not support is refused by its name here; the rest becomes
sampling parameters as vLLM's models read them.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaMode
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.exceptions import VLLMClientError

from lmi_vllm.errors import PayloadError
from lmi_vllm.features.seq2seq.sampling import NO_GRAMMARS

SCHEMA_REFERENCE: Final = "#/components/schemas/{model}"
COMPLETIONS: Final = "completions"
CHAT: Final = "chat/completions"
_MODELS: Final[Mapping[str, tuple[Any, Any]]] = MappingProxyType(
    {
        COMPLETIONS: (CompletionRequest, CompletionResponse),
        CHAT: (ChatCompletionRequest, ChatCompletionResponse),
    }
)
KINDS: Final = tuple(_MODELS)
# Fields of vLLM's request models that have an effect here, and those that have none anywhere.
_SUPPORTED: Final = frozenset(
    {
        "model", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "top_k",
        "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
        "logprobs", "max_tokens", "min_tokens", "stop_token_ids", "include_stop_str_in_output",
        "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "bad_words",
        "allowed_token_ids", "truncate_prompt_tokens", "truncation_side", "add_special_tokens",
        "return_token_ids", "prompt_logprobs", "response_format", "structured_outputs",
        "prompt", "messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt",
        "continue_final_message", "chat_template_kwargs",
        "user", "request_id", "session_id", "parallel_tool_calls", "include_reasoning",
        "length_penalty",
    }
)  # fmt: skip
# Of SamplingParams: how vLLM delivers, and what it derives from other fields.
_DELIVERY: Final = frozenset(
    {
        "output_kind",
        "detokenize",
        "skip_clone",
        "output_text_buffer_length",
        "skip_reading_prefix_cache",
    }
)


@contextmanager
def request_faults() -> Iterator[None]:
    """Raise what reading a request may raise as a fault of the request.

    Raises:
        PayloadError: for a validation error of vLLM or pydantic, and for a malformed value.
    """
    try:
        yield
    except ValidationError as error:
        raise PayloadError(_problems(error)) from error
    except VLLMClientError as error:
        raise PayloadError(str(error)) from error
    except (AttributeError, LookupError, RecursionError, ValueError, TypeError) as error:
        raise PayloadError(f"the request cannot be read: {error}") from error


def read_request(kind: str, body: Mapping[str, object]) -> Any:
    """Return the body as vLLM's request model; call it inside `request_faults`.

    Raises:
        PayloadError: a field is set that this engine does not support.
    """
    request = _reader(kind).validate_python(dict(body))
    _refuse_unread(request)
    return request


@functools.cache
def _reader(kind: str) -> "TypeAdapter[Any]":
    return TypeAdapter(_MODELS[kind][0])


def answer_model(kind: str) -> Any:
    """Return vLLM's response model of a kind of call (a class, or a union of them)."""
    return _MODELS[kind][1]


@functools.cache
def openapi_document() -> Mapping[str, Any]:
    """Return an OpenAPI document of the bodies that are read and the answers that are written."""
    wanted: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = []
    for kind, (request, answer) in _MODELS.items():
        wanted.append((kind, "validation", TypeAdapter(request)))
        wanted.append((kind, "serialization", TypeAdapter(answer)))
    found, shared = TypeAdapter.json_schemas(wanted, ref_template=SCHEMA_REFERENCE)
    bodies = {key: {"content": {"application/json": {"schema": one}}} for key, one in found.items()}
    operations = {
        kind: {
            "requestBody": bodies[kind, "validation"],
            "responses": {"200": bodies[kind, "serialization"]},
        }
        for kind in _MODELS
    }
    return {
        "paths": {f"/v1/{kind}": {"post": operation} for kind, operation in operations.items()},
        "components": {"schemas": shared.get("$defs", {})},
    }


def sampling_fields(
    kind: str, request: Any, max_model_len: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of SamplingParams that differ from vLLM's own, as its model gives them."""
    wanted = vars(request)[
        "max_tokens"
    ]  # reading the attribute of a chat request warns of deprecation
    if kind == CHAT and request.max_completion_tokens is not None:
        wanted = request.max_completion_tokens
    params = request.to_sampling_params(max_model_len if wanted is None else wanted, dict(defaults))
    usual = type(params)()
    given = {
        name: getattr(params, name)
        for name in params.__struct_fields__
        if not name.startswith("_")
        and name not in _DELIVERY
        and getattr(params, name) != getattr(usual, name)
    }
    return {"max_tokens": params.max_tokens, "temperature": params.temperature, **given}


def _refuse_unread(request: Any) -> None:
    """Refuse fields that were set and that this engine does not read.

    Raises:
        PayloadError: names the first of them.
    """
    if gone := [name for name in request.model_extra or () if name.startswith("guided_")]:
        raise PayloadError(NO_GRAMMARS.format(name=gone[0]))
    fields = type(request).model_fields
    for name in fields:
        if name in _SUPPORTED or name not in request.model_fields_set:
            continue
        value = vars(request)[name]
        if value in (None, fields[name].default, [], {}) or (name, value) == (
            "tool_choice",
            "none",
        ):
            continue
        raise PayloadError(
            f"{name} is not available: encoder-decoder models run on the Transformers engine"
        )


def _problems(error: ValidationError) -> str:
    """Return one sentence for each thing that is wrong with a body."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()
    )
