"""What is done with an admitted request: decode, adapters, input hook, a lane, output hook."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from lmi_vllm.errors import Dialect, PayloadError
from lmi_vllm.hooks import InputHook
from lmi_vllm.inference.context import Decode, RequestContext
from lmi_vllm.inference.hooked_lane import generate_hooked, joined
from lmi_vllm.inference.lmi_lane import generate
from lmi_vllm.inference.openai_lane import ask_openai
from lmi_vllm.inference.request.body import EXAMPLE_BODY, decode_body
from lmi_vllm.inference.request.lmi import completion_request, parse_lmi_request
from lmi_vllm.inference.request.tgi import with_tgi_meaning
from lmi_vllm.inference.response.openai_events import FramedEvents, lmi_reply, unchanged_reply
from lmi_vllm.inference.response.streams import gathered, invocations_dialect
from lmi_vllm.messages import FRAMINGS, GENERATE, OpenAIReply, Reply

_SUCCESS = 200
# Calls that only count or show tokens: they generate nothing for a hook.
_UNHOOKED_KINDS: Final = frozenset({"tokenize", "detokenize"})


class PayloadKind(StrEnum):
    """What a payload asks for; the first kind that matches wins."""

    GENERATION = "generation"
    COMPLETION = "completions"
    CHAT = "chat/completions"


async def invoke(context: RequestContext) -> Reply:
    """Answer `/invocations` and similar routes: any kind of payload, with the user's code."""
    handle, steps = context.runtime.hooks.handle, context.runtime.steps
    if handle and (own := await handle(context.call, context.statuses)) is not None:
        return own
    for check in steps.checks:
        await check(context.call)
    payload = await prepare(context, _decode(context, steps.decoders))
    if context.needs_parts:
        return await _answer_each(context, payload)
    return await _answer(context, payload)


async def ask(context: RequestContext, kind: str, payload: Any = None) -> Reply:
    """Answer a `/v1` route with vLLM's own bytes, with the user's code.

    `payload` is the body's object, if it was read before.
    """
    is_hooked, handle = kind not in _UNHOOKED_KINDS, context.runtime.hooks.handle
    if handle and is_hooked and (own := await handle(context.call, context.statuses)) is not None:
        return own
    if payload is None:
        payload = decode_body(context.call.body, "application/json")
    payload = await prepare(context, payload, is_hooked=is_hooked)
    output = context.hooks.output if is_hooked else None
    answer = await ask_openai(context, kind, payload, is_direct=output is None)
    if output is None or answer.status != _SUCCESS:
        return unchanged_reply(answer)
    return await output(context.call, payload, answer, context.statuses)


async def prepare(context: RequestContext, payload: Any, *, is_hooked: bool = True) -> Any:
    """Return the payload for the lanes: its adapters held, changed by the input hook.

    The hook is left out where each prompt of a list is prepared as a request of its own.

    Raises:
        CustomCodeError: the hook failed.
        LmiError: an adapter cannot be held; see `RequestContext.hold_adapters`.
        PayloadError: only a hook could read the body.
    """
    runtime = context.runtime
    if runtime.profile.tgi_compat and isinstance(payload, dict):
        is_adapter = runtime.adapters.__contains__
        payload = with_tgi_meaning(payload, runtime.profile, is_adapter)
    await context.hold_adapters(payload)
    if not is_hooked or context.needs_parts:
        return payload
    if context.hooks.input is not None:
        if isinstance(payload, dict) and "inputs" in payload and "prompt" not in payload:
            context.check_model(payload)  # what the hook returns may not have it
        return await _input_hooked(context, context.hooks.input, payload)
    if not isinstance(payload, dict) or isinstance(payload.get("inputs"), bytes):
        decode_body(context.call.body, context.call.content_type)  # says why
        raise PayloadError("the body must be a JSON object")
    return payload


async def _input_hooked(context: RequestContext, hook: InputHook, payload: Any) -> dict[str, Any]:
    """Return the payload that the hook returns; it cannot change the adapter.

    Raises:
        CustomCodeError: the hook failed.
    """
    if isinstance(payload, dict):  # as in LMI, the hook does not see it
        payload = {key: value for key, value in payload.items() if key != "adapters"}
    context.adapters = context.adapters[:1]
    made = await hook(context.call, payload)
    return {**made, "adapters": "" if context.adapter is None else context.adapter.name}


async def _answer(context: RequestContext, payload: dict[str, Any]) -> Reply:
    """Answer a prepared payload: a feature, or a lane by the payload's keys, then by hooks."""
    for answer in context.runtime.steps.answers:
        if (reply := await answer(context, payload)) is not None:
            return reply
    profile, call, output = context.runtime.profile, context.call, context.hooks.output
    if profile.task != GENERATE:
        raise PayloadError(f"this model is for {profile.task}, not for text generation")
    kind = PayloadKind.GENERATION if call.tgi_route and output is None else dispatch(payload)
    if kind is PayloadKind.GENERATION:
        return await _generate(context, payload)
    if output is not None:
        return await ask_hooked(context, kind, payload, payload)
    if context.record is not None:
        context.record.dialect = Dialect.OPENAI
    events = FramedEvents(invocations_dialect(profile), context.framing, context.statuses)
    openai = await ask_openai(context, kind, payload, events)
    return lmi_reply(openai, events.framing.content_type)


async def _generate(context: RequestContext, payload: dict[str, Any]) -> Reply:
    """Answer `inputs`; an output hook gets vLLM's completion."""
    context.check_model(payload)
    hooks, runtime = context.hooks, context.runtime
    if hooks.output is not None:
        request = parse_lmi_request(payload, runtime.profile, context.call.tgi_route)
        body = completion_request(request, payload)
        return await ask_hooked(context, PayloadKind.COMPLETION, payload, body)
    if hooks.tokens is not None:
        return await generate_hooked(context, payload, hooks.tokens)
    return await generate(context, payload)


async def ask_hooked(
    context: RequestContext,
    kind: str,
    payload: Mapping[str, Any],
    body: Mapping[str, Any],
    make_reply: Callable[[OpenAIReply], Reply] = lmi_reply,
) -> Reply:
    """Return vLLM's answer to `body` as the output hook of `payload` makes it, else `make_reply`.

    Raises:
        LmiError: vLLM refused the request, or the output hook failed.
    """
    output = context.hooks.output
    answer = await ask_openai(context, kind, body, is_direct=output is None)
    if output is None or answer.status != _SUCCESS:
        return make_reply(answer)
    return await output(context.call, payload, answer, context.statuses)


async def _answer_each(context: RequestContext, payload: dict[str, Any]) -> Reply:
    """Answer each prompt of a list as a request of its own: their adapters' hooks differ."""
    prompts, adapters = payload["inputs"], context.adapters
    context.take_slots("inputs", len(prompts))
    parts = [
        {**payload, "inputs": prompt, "adapters": "" if adapter is None else adapter.name}
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    replies = await gathered([_answer_part(context.part(i), part) for i, part in enumerate(parts)])
    if any(reply.stream is not None for reply in replies):
        raise PayloadError("inputs: streaming takes one prompt, not a list")
    return Reply(200, FRAMINGS["json"].content_type, joined([reply.body for reply in replies]))


async def _answer_part(context: RequestContext, part: dict[str, Any]) -> Reply:
    return await _answer(context, await prepare(context, part))


def _decode(context: RequestContext, decoders: Sequence[Decode]) -> Any:
    """Return the payload of `/invocations` and similar routes.

    Raises:
        PayloadError: see `decode_body`.
    """
    call, runtime = context.call, context.runtime
    try:
        return decode_body(call.body, call.content_type)
    except PayloadError:
        found = (runtime.hooks, *(adapter.hooks for adapter in runtime.adapters))
        for hook in filter(None, (hooks.input for hooks in found)):
            return hook.undecoded(call)
        for decode in decoders:
            if (payload := decode(context)) is not None:
                return payload
        raise


def dispatch(payload: Mapping[str, Any]) -> PayloadKind:
    """Return the kind of a payload.

    Raises:
        PayloadError: no key that any kind knows.
    """
    for key, kind in (
        ("prompt", PayloadKind.COMPLETION),
        ("inputs", PayloadKind.GENERATION),
        ("messages", PayloadKind.CHAT),
        ("prompt_embeds", PayloadKind.COMPLETION),
    ):
        if key in payload:
            return kind
    raise PayloadError(
        f"Invalid payload: it must contain prompt, inputs, or messages; example: {EXAMPLE_BODY}"
    )
