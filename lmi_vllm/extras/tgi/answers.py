"""The answers of TGI's `/info` and `/tokenize`."""

from collections.abc import Mapping
from typing import Any

import orjson

from lmi_vllm._version import __version__
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.context import RequestContext, Runtime
from lmi_vllm.inference.request.body import decode_body
from lmi_vllm.messages import Reply


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
    async with context:
        payload = decode_body(context.call.body, "application/json")
        tokens = await _tokens(payload, context.runtime)
    return Reply(200, "application/json", orjson.dumps(tokens) + b"\n")


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
