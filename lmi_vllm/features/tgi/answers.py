"""The answers of TGI's `/info`, `/tokenize` and `/chat_tokenize`."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from lmi_vllm._version import __version__
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.context import RequestContext, Runtime
from lmi_vllm.inference.request.body import decode_body
from lmi_vllm.inference.request.tgi import with_tgi_meaning
from lmi_vllm.messages import OpenAICall, Reply

_CHAT_FIELDS: Final = ("messages", "tools")  # all that TGI's template reads
_SUCCESS: Final = 200


def describe(model: str, runtime: Runtime) -> dict[str, Any]:
    """Return TGI 3's `/info`; what has no meaning here is null."""
    engine, profile = runtime.engine, runtime.profile
    return {
        "model_id": model,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": profile.job_queue_size,
        "max_best_of": profile.limits.max_sequences,
        "max_stop_sequences": profile.limits.max_stop_strings,
        "max_input_tokens": engine.max_model_len - 1,
        "max_total_tokens": engine.max_model_len,
        "validation_workers": 1,
        "max_client_batch_size": profile.job_queue_size,
        "router": "lmi_vllm",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def is_tokenize_body(body: bytes) -> bool:
    """Whether a `/tokenize` body is TGI's; with `prompt` or `messages` it is vLLM's."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    is_vllm_s = isinstance(payload, dict) and ("prompt" in payload or "messages" in payload)
    return isinstance(payload, dict) and "inputs" in payload and not is_vllm_s


async def tokenize(context: RequestContext) -> Reply:
    """Answer TGI's `/tokenize`: a list of tokens, each with the part of the text it stands for.

    Raises:
        PayloadError: `inputs` is not text or too long, or `add_special_tokens` not a boolean.
    """
    payload = decode_body(context.call.body, "application/json")
    tokens = await _tokens(payload, context.runtime)
    return Reply(200, "application/json", orjson.dumps(tokens) + b"\n")


async def chat_tokenize(context: RequestContext) -> Reply:
    """Answer TGI's `/chat_tokenize`: the text that the chat template makes, and its tokens.

    Raises:
        PayloadError: the body is no chat, or the model's template refuses it.
    """
    payload = decode_body(context.call.body, "application/json")
    if not isinstance(payload, dict) or "messages" not in payload:
        raise PayloadError("messages: expected a list of messages")
    runtime = context.runtime
    chat = {name: payload[name] for name in _CHAT_FIELDS if payload.get(name) is not None}
    served = runtime.profile.served_names
    chat = with_tgi_meaning(chat, runtime.profile, lambda _: False) | {"model": served[0]}
    ids = (await _asked(context, "tokenize", chat))["tokens"]
    texts = await _asked(context, "detokenize", {"model": served[0], "tokens": ids})
    text = str(texts["prompt"])
    found = await _tokens({"inputs": text, "add_special_tokens": False}, runtime)
    body = {"tokenize_response": found, "templated_text": text}
    return Reply(200, "application/json", orjson.dumps(body) + b"\n")


async def _asked(context: RequestContext, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine's own route answers; its refusal is one of the payload."""
    call = OpenAICall(kind, body, {}, context.call.request_id)
    answer = await context.runtime.engine.answer_openai(call)
    found: dict[str, Any] = orjson.loads(answer.body)
    if answer.status != _SUCCESS:
        raise PayloadError(str(found.get("error", {}).get("message", "the chat is refused")))
    return found


async def _tokens(payload: Mapping[str, Any], runtime: Runtime) -> list[dict[str, Any]]:
    text, adds_special = payload.get("inputs"), payload.get("add_special_tokens", True)
    if not isinstance(text, str):
        raise PayloadError("inputs: expected text")
    if not isinstance(adds_special, bool):
        raise PayloadError("add_special_tokens: expected true or false")
    if len(text) > (most := runtime.profile.limits.max_tokenize_length):
        allowed = f"{most} characters (LMI_MAX_TOKENIZE_LENGTH)"
        raise PayloadError(f"inputs: at most {allowed} (got {len(text)})")
    tokens = await runtime.engine.tokenize(text, add_special_tokens=adds_special)
    return [
        {
            "id": token.id,
            "text": text[token.start : token.stop],
            "start": token.start,
            "stop": token.stop,
        }
        for token in tokens
    ]
