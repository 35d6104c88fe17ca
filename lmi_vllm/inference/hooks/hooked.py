"""Where hooks meet a request: on what payload they work, and vLLM's request for a formatter."""

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import orjson

from lmi_vllm.inference.context import RequestContext
from lmi_vllm.inference.hooks.functions import InputHook
from lmi_vllm.inference.request.payload import LmiRequest, decode_body
from lmi_vllm.messages import InferenceCall

# What vLLM's completion handler would take from the model's generation config if left out.
_NEUTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
)

# Calls that only count or show tokens: nothing is generated for a hook to look at.
UNHOOKED_KINDS: Final = frozenset({"tokenize", "detokenize"})


def undecoded_payload(call: InferenceCall) -> Any:
    """Return a payload that only an input hook can read: bytes, or JSON that is no object.

    Raises:
        PayloadError: see `decode_body`.
    """
    if call.content_type and "json" not in call.content_type.lower():
        return {"inputs": call.body}
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(call.body)
    return decode_body(call.body, call.content_type)


async def apply_input_hook(
    context: RequestContext, hook: InputHook, payload: Any
) -> dict[str, Any]:
    """Return the payload that the hook makes; whatever it does, the adapter stays the same.

    Raises:
        CustomCodeError: the hook failed.
    """
    if isinstance(payload, dict):  # as in LMI, the hook does not see it
        payload = {key: value for key, value in payload.items() if key != "adapters"}
    context.adapters = context.adapters[:1]
    adapter, code = context.adapter, context.runtime.code
    made: dict[str, Any] = await code.format_input(hook, context.call, payload)
    return {**made, "adapters": "" if adapter is None else adapter.name}


def completion_body(request: LmiRequest, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's completion request that means the same as an LMI one."""
    prompt: Any = list(request.prompts) if request.is_list else request.prompts[0]
    body: dict[str, Any] = {"prompt": prompt, "stream": request.is_streaming}
    if not request.apply_model_defaults:
        body |= _NEUTRAL
    body |= request.sampling
    if request.truncate is not None:
        body |= {"truncate_prompt_tokens": request.truncate, "truncation_side": "left"}
    if request.priority:
        body["priority"] = request.priority
    if request.candidates.beams is not None:
        beams = request.candidates.beams
        body |= {"use_beam_search": True, "n": beams.width, "length_penalty": beams.length_penalty}
    if request.return_full_text:
        body["echo"] = True
    for key in ("adapters", "model"):
        if key in payload:
            body[key] = payload[key]
    return body


def joined(bodies: list[bytes]) -> bytes:
    """Return the answers of a list as one array; what is no JSON goes in as text."""
    parts = []
    for body in bodies:
        try:
            orjson.loads(body)
            parts.append(body.strip())
        except orjson.JSONDecodeError:
            parts.append(orjson.dumps(body.decode().removesuffix("\n")))
    return b"[" + b",".join(parts) + b"]\n"
