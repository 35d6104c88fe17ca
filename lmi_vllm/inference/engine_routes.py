"""Requests for the engine's own HTTP application, with our limits and adapters.

The body is passed on unchanged, so the application decides what it means and how it is refused. It
is read here only for the amount of work and for the adapter's name.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from lmi_vllm.engine.base import HttpApplication
from lmi_vllm.errors import NotReadyError
from lmi_vllm.inference.context import RequestContext, Runtime
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.pipeline import ask
from lmi_vllm.inference.request.limits import check_limits, sequence_count
from lmi_vllm.inference.response.openai_events import RESPONSES_PATH, event_stream, unchanged_reply
from lmi_vllm.inference.response.streams import DirectEventWriter
from lmi_vllm.messages import (
    HttpCall,
    HttpRoute,
    InferenceCall,
    Reply,
    RouteKind,
)
from lmi_vllm.multipart import boundary_of, text_fields

READING: Final = ("GET", "HEAD", "OPTIONS")
_JSON: Final = "application/json"
_DEEP: Final = 100  # levels
_LARGE: Final = 2**63


async def pass_on(
    runtime: Runtime, lifecycle: Lifecycle, http: HttpCall, route: HttpRoute
) -> Reply:
    """Return the application's answer to a request that is not for the model; it needs no slot."""
    application = _application(runtime)
    answer = await application.call(http)
    is_changed = http.method in route.methods and http.method not in READING
    if route.kind is RouteKind.MANAGEMENT and is_changed:
        is_asleep = await application.is_asleep()
        lifecycle.set_asleep(is_asleep=is_asleep)
    reply = unchanged_reply(answer)
    if answer.stream is None:
        return reply
    events = event_stream(route, answer.content_type).events(answer.stream)
    return replace(reply, stream=events)


async def forward(context: RequestContext, http: HttpCall, route: HttpRoute) -> Reply:
    """Return the application's answer to an admitted request for the engine.

    Raises:
        LmiError: a limit, the adapter, the time or the engine; the application's refusals are
            answers.
    """
    application = _application(context.runtime)
    payload = _payload(context.call)
    if await _is_hooked(context, payload):
        return await ask(context, http.path.removeprefix("/v1").removeprefix("/"))
    _check(context, payload, http.path)
    ref = None if context.adapter is None else context.adapter.ref
    http = replace(http, adapter=ref, model=context.base_name)
    if "request_id" in payload:
        http = replace(http, request_id="")
    limit = context.silence_limit()
    direct = DirectEventWriter(limit)
    answer = await limit.within(application.call(http, direct))
    reply = unchanged_reply(answer)
    if answer.stream is None:
        return reply
    stream = event_stream(route, answer.content_type)
    direct.convert = stream.event
    context.own_stream(answer.stream, direct.connect)
    events = context.stream_ends.events(stream.events(answer.stream), stream.error, limit)
    return replace(reply, stream=events)


def _application(runtime: Runtime) -> HttpApplication:
    if (application := runtime.engine.http) is None:  # another model was loaded meanwhile
        raise NotReadyError("the model is being replaced")
    return application


async def _is_hooked(context: RequestContext, payload: Mapping[str, Any]) -> bool:
    """Whether users' code sees the request; its adapters are held then, since they may have hooks.

    Raises:
        LmiError: see `RequestContext.hold_adapters`.
    """
    is_read = "json" in (context.call.content_type or "json")  # a payload that such code can read
    if is_read and context.runtime.hooks.are_some:  # its handler may need no adapter
        return True
    await context.hold_adapters(payload, _check_limits)
    return is_read and any(held is not None and held.hooks.are_some for held in context.adapters)


def plain_payload(call: InferenceCall) -> dict[str, Any] | None:
    """Return the object in a body that the application would read in the same way.

    The application reads a body of type JSON with Python's parser. It accepts more than orjson,
    fails at deep objects, and keeps whole numbers of any size.
    """
    if call.content_type.lower().split(";", 1)[0] != _JSON:
        return None
    try:
        parsed = orjson.loads(call.body)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) and _is_plain(parsed) else None


def _is_plain(payload: Mapping[str, Any]) -> bool:
    """Whether it is not deep, and has no number so large that it may have been a whole one."""
    level: list[Any] = [payload]
    for _ in range(_DEEP):
        nested: list[Any] = []
        for each in level:
            for value in each.values() if isinstance(each, dict) else each:
                kind = type(value)
                if kind is dict or kind is list:
                    nested.append(value)
                elif kind is float and abs(value) >= _LARGE:
                    return False
        if not nested:
            return True
        level = nested
    return False


def _check_limits(context: RequestContext, payload: Mapping[str, Any]) -> None:
    """Refuse a request for too much work."""
    limits = context.runtime.profile.limits
    check_limits(payload, limits)
    if isinstance(nested := payload.get("sampling_params"), dict):
        check_limits(nested, limits, "sampling_params.")


def _check(context: RequestContext, payload: Mapping[str, Any], path: str) -> None:
    """Check the limits, and take a slot for each prompt."""
    _check_limits(context, payload)
    if path != RESPONSES_PATH:  # its list of inputs is one conversation
        nested = payload.get("sampling_params")
        flat = {**nested, **payload} if isinstance(nested, dict) else payload
        context.take_slots("prompts", sequence_count(flat))


def _payload(call: InferenceCall) -> Mapping[str, Any]:
    """Return the object in a body as the application will read it, or a form's fields.

    Empty for a body without either. orjson is the stricter parser: it refuses NaN, lone surrogates
    and UTF-16.
    """
    if boundary := boundary_of(call.content_type):
        return text_fields(call.body, boundary)
    try:
        parsed = orjson.loads(call.body)
    except orjson.JSONDecodeError:
        try:
            parsed = json.loads(call.body)
        except (ValueError, RecursionError):
            return {}
    return parsed if isinstance(parsed, dict) else {}
