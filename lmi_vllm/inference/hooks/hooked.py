"""Where hooks meet a request: which apply, on what payload, and vLLM's request for a formatter."""

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import orjson

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.selection import (
    ADAPTER_ALIAS_HEADER,
    adapter_name,
    adapter_names,
)
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.hooks.custom_code import CustomCode
from lmi_vllm.inference.hooks.functions import NO_HOOKS, Hooks, OutputHook
from lmi_vllm.inference.pooling import GENERATE, parse_pooling_request
from lmi_vllm.inference.request.bodies import decode_body
from lmi_vllm.inference.request.payload import Family, LmiRequest, dispatch, parse_lmi_request
from lmi_vllm.inference.request_hold import RequestHold
from lmi_vllm.inference.response.openai_replies import error_of
from lmi_vllm.messages import InferenceCall, OpenAIReply, Reply, ServingProfile

# What vLLM's completion handler would take from the model's generation config if left out.
_NEUTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
)

# Calls that only count or show tokens: nothing is generated for a hook to look at.
UNHOOKED_KINDS: Final = frozenset({"tokenize", "detokenize"})


def decode_payload(code: CustomCode, adapters: AdapterRegistry, call: InferenceCall) -> Any:
    """Return the payload; bytes and JSON that only an input hook can read, where there is one.

    Raises:
        PayloadError: see `decode_body`.
    """
    try:
        return decode_body(call.body, call.content_type)
    except PayloadError:
        if code.hooks.input is None and not any(adapter.hooks.input for adapter in adapters):
            raise
        if call.content_type and "json" not in call.content_type.lower():
            return {"inputs": call.body}
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(call.body)
        raise


def request_content(call: InferenceCall) -> dict[str, bytes]:
    """Return what a handler finds as content: query parameters, then the body."""
    content = {name: value.encode() for name, value in call.query.items()}
    return {**content, "data": call.body}


async def select_hooks(
    code: CustomCode,
    adapters: AdapterRegistry,
    call: InferenceCall,
    payload: Any,
    hold: RequestHold,
) -> tuple[Hooks, str | None]:
    """Return the hooks of the request's adapter over the base's, and its name; it is held.

    Raises:
        UnknownAdapterError: no adapter of that name.
        PayloadError: `adapters` is not a name.
    """
    fields = payload if isinstance(payload, dict) else {}
    given = fields.get("adapters")
    if isinstance(given, list) and given and len(set(map(str, given))) == 1:
        fields = {**fields, "adapters": given[0]}
    name = adapter_name(call, fields, adapters.__contains__)
    adapter = await hold.adapter(adapters, name, call.properties.get(ADAPTER_ALIAS_HEADER))
    return (adapter.hooks if adapter else NO_HOOKS).over(code.hooks), name


async def apply_input_hook(
    code: CustomCode, hooks: Hooks, call: InferenceCall, payload: Any, name: str | None
) -> dict[str, Any]:
    """Return the payload to dispatch; whatever the hook does, the adapter stays the selected one.

    Raises:
        CustomCodeError: the hook failed.
        PayloadError: there is none, and the payload is not for us to read.
    """
    if hooks.input is not None:
        if isinstance(payload, dict):  # as in LMI, the hook does not see it
            payload = {key: value for key, value in payload.items() if key != "adapters"}
        made: dict[str, Any] = await code.format_input(hooks.input, call, payload)
        return {**made, "adapters": name or ""}
    if not isinstance(payload, dict) or isinstance(payload.get("inputs"), bytes):
        decode_body(call.body, call.content_type)  # says why
        raise PayloadError("the body must be a JSON object")
    return payload


def differing_adapters(
    call: InferenceCall, payload: Any, adapters: AdapterRegistry
) -> list[str | None]:
    """Return one name for each prompt where a list names several adapters; else nothing.

    Raises:
        PayloadError: as many names as prompts are needed.
    """
    if not isinstance(payload, dict) or not isinstance(payload.get("inputs"), list):
        return []
    prompts = len(payload["inputs"])
    names = adapter_names(call, payload, prompts, adapters.__contains__)
    return names if len(set(names)) > 1 else []


async def has_hooks(
    code: CustomCode,
    adapters: AdapterRegistry,
    call: InferenceCall,
    names: Sequence[str | None],
    hold: RequestHold,
) -> bool:
    """Return whether any of these adapters, or the base model, brings a formatter."""
    alias = call.properties.get(ADAPTER_ALIAS_HEADER)
    found = [await hold.adapter(adapters, name, alias) for name in names]
    all_hooks = [code.hooks, *(adapter.hooks for adapter in found if adapter)]
    return any(hooks.input or hooks.output for hooks in all_hooks)


async def formatted(
    code: CustomCode, hook: OutputHook, call: InferenceCall, payload: Any, answer: OpenAIReply
) -> Reply:
    """Return what the output hook makes of vLLM's answer; its errors are not shown to the hook.

    Raises:
        LmiError: vLLM refused the request, or the hook failed.
    """
    if answer.stream is None and answer.status >= 400:  # noqa: PLR2004 (an error status)
        raise error_of(answer.body)
    return await code.format_output(hook, call, payload, answer)


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


def openai_request(
    profile: ServingProfile,
    adapters: AdapterRegistry,
    call: InferenceCall,
    payload: dict[str, Any],
) -> tuple[str, Mapping[str, Any]]:
    """Return the kind and body of the OpenAI call whose response an output hook gets.

    Raises:
        PayloadError: it is no payload that this model takes.
    """
    if profile.task != GENERATE:
        request = parse_pooling_request(payload, profile, adapters.__contains__)
        return request.kind, request.body
    family = dispatch(payload)
    if family is not Family.GENERATION:
        return family, payload
    body = completion_body(parse_lmi_request(payload, profile, call.tgi_route), payload)
    return Family.COMPLETION, body


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
