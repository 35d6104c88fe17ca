"""The request pipeline: prepare (decode, adapters, hooks), execute (a lane), render."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

from lmi_vllm.errors import Dialect, PayloadError
from lmi_vllm.hooks import InputHook, OutputHook, TokenHook
from lmi_vllm.inference.context import RequestContext, RequestStep
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A decoded request: its lane, the lane's payload, and the renderer of the answer."""

    payload: Mapping[str, Any]  # of the request
    kind: str = ""  # kind of vLLM's handler; empty is the LMI lane
    body: Mapping[str, Any] | None = None  # for the handler, if it is not the payload
    events: FramedEvents | None = None  # how a stream is converted, if not as on `/v1`
    output: OutputHook | None = None
    tokens: TokenHook | None = None  # in the LMI lane
    reply: Callable[[OpenAIReply], Reply] | None = None  # without an output hook


async def invoke(context: RequestContext, steps: Sequence[RequestStep]) -> Reply:
    """Answer `/invocations` and similar routes: any kind of payload, with the user's code."""
    async with context:
        reply = await _handle(context)
        if reply is None:
            for step in steps:
                await step.check(context.call)
            payload = await prepare(context, partial(_decode, context, steps))
            answer = _answer_each if context.needs_parts else _answer
            reply = await answer(context, payload, steps)
        return context.deliver(reply)


async def ask(context: RequestContext, kind: str, payload: Any = None) -> Reply:
    """Answer a `/v1` route with vLLM's own bytes, with the user's code.

    `payload` is the body's object, if it was read before.
    """
    async with context:
        return await ask_admitted(context, kind, payload)


async def ask_admitted(context: RequestContext, kind: str, payload: Any = None) -> Reply:
    """As `ask`, for a request that has its slot in the queue."""
    is_hooked = kind not in _UNHOOKED_KINDS
    if is_hooked and (own := await _handle(context)) is not None:
        return context.deliver(own)
    decode = partial(_decode_json, context, payload)
    payload = await prepare(context, decode, is_hooked=is_hooked)
    output = context.hooks.output if is_hooked else None
    prepared = Prepared(payload, kind, output=output, reply=unchanged_reply)
    return context.deliver(await render(context, prepared, await execute(context, prepared)))


async def prepare(
    context: RequestContext, decode: Callable[[], Any], *, is_hooked: bool = True
) -> Any:
    """Return the payload for the lanes: decoded, its adapters held, changed by the input hook.

    The hook is left out where each prompt of a list is prepared as a request of its own.

    Raises:
        CustomCodeError: the hook failed.
        LmiError: an adapter cannot be held; see `RequestContext.hold_adapters`.
        PayloadError: the body cannot be decoded, or only a hook could read it.
    """
    payload, runtime = decode(), context.runtime
    if runtime.profile.tgi_compat and isinstance(payload, dict):
        is_adapter = runtime.adapters.__contains__
        payload = with_tgi_meaning(payload, runtime.profile.served_names, is_adapter)
    await context.hold_adapters(payload)
    if not is_hooked or context.needs_parts:
        return payload
    if context.hooks.input is not None:
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


async def execute(context: RequestContext, prepared: Prepared) -> Reply | OpenAIReply:
    """Return the lane's answer; the LMI lane renders its rows while they are generated."""
    if not prepared.kind:
        if prepared.tokens is not None:
            return await generate_hooked(context, prepared.payload, prepared.tokens)
        return await generate(context, prepared.payload)
    body = prepared.payload if prepared.body is None else prepared.body
    is_direct = prepared.output is None
    return await ask_openai(context, prepared.kind, body, prepared.events, is_direct=is_direct)


async def render(context: RequestContext, prepared: Prepared, answer: Reply | OpenAIReply) -> Reply:
    """Return the reply for a lane's answer.

    Raises:
        LmiError: vLLM refused the request, or the output hook failed.
    """
    if isinstance(answer, Reply):
        return answer
    if prepared.output is not None and answer.status == _SUCCESS:
        return await prepared.output(context.call, prepared.payload, answer, context.statuses)
    return (prepared.reply or lmi_reply)(answer)


async def _answer(context: RequestContext, payload: Any, steps: Sequence[RequestStep]) -> Reply:
    """Answer a prepared payload."""
    for step in steps:
        if (reply := await step.answer(context, payload)) is not None:
            return reply
    prepared = _choose_lane(context, payload)
    return await render(context, prepared, await execute(context, prepared))


async def _answer_each(
    context: RequestContext, payload: dict[str, Any], steps: Sequence[RequestStep]
) -> Reply:
    """Answer each prompt of a list as a request of its own: their adapters' hooks differ."""
    prompts, adapters = payload["inputs"], context.adapters
    context.take_slots("inputs", len(prompts))
    parts = [
        {**payload, "inputs": prompt, "adapters": "" if adapter is None else adapter.name}
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    replies = await gathered(
        [_answer_part(context.part(i), part, steps) for i, part in enumerate(parts)]
    )
    if any(reply.stream is not None for reply in replies):
        raise PayloadError("inputs: streaming takes one prompt, not a list")
    return Reply(200, FRAMINGS["json"].content_type, joined([reply.body for reply in replies]))


async def _answer_part(
    context: RequestContext, part: dict[str, Any], steps: Sequence[RequestStep]
) -> Reply:
    return await _answer(context, await prepare(context, lambda: part), steps)


def _choose_lane(context: RequestContext, payload: dict[str, Any]) -> Prepared:
    """Return the lane, by the payload's keys, then by hooks."""
    profile, call, output = context.runtime.profile, context.call, context.hooks.output
    if profile.task != GENERATE:
        raise PayloadError(f"this model is for {profile.task}, not for text generation")
    kind = PayloadKind.GENERATION if call.tgi_route and output is None else dispatch(payload)
    if kind is PayloadKind.GENERATION:
        context.check_model(payload)
        if output is None:
            return Prepared(payload, tokens=context.hooks.tokens)
        lmi_request = parse_lmi_request(payload, profile, call.tgi_route)
        body = completion_request(lmi_request, payload)
        return Prepared(payload, PayloadKind.COMPLETION, body, output=output)
    if output is not None:
        return Prepared(payload, kind, output=output)
    if context.record is not None:
        context.record.dialect = Dialect.OPENAI
    events = FramedEvents(invocations_dialect(profile), context.framing, context.statuses)
    reply = partial(lmi_reply, content_type=events.framing.content_type)
    return Prepared(payload, kind, events=events, reply=reply)


async def _handle(context: RequestContext) -> Reply | None:
    """Return the answer of the user's own handler; None leaves it to the built-in one."""
    handle = context.runtime.hooks.handle
    return None if handle is None else await handle(context.call, context.statuses)


def _decode(context: RequestContext, steps: Sequence[RequestStep]) -> Any:
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
        for step in steps:
            if (payload := step.undecoded(context)) is not None:
                return payload
        raise


def _decode_json(context: RequestContext, payload: Any) -> Any:
    """Return `payload`, or the body as JSON if it was not read before."""
    return decode_body(context.call.body, "application/json") if payload is None else payload


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
