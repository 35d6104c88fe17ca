"""Requests for routes of the engine's own HTTP application: our limits and adapters around them.

The body goes on as it came, so that what it means and how it is refused is the application's
business. It is only looked at: for the work that it asks for and for the adapter that it names.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from lmi_vllm.errors import NotReadyError
from lmi_vllm.inference.context import RequestContext
from lmi_vllm.inference.pipeline import ask
from lmi_vllm.inference.request.parameters import check_limits, sequence_count
from lmi_vllm.inference.response.openai_events import event_stream
from lmi_vllm.messages import HttpCall, HttpRoute, OpenAIReply, Reply, RouteKind


async def forward(context: RequestContext, http: HttpCall, route: HttpRoute) -> Reply:
    """Return the application's answer; a request for the engine waits its turn like any other.

    Raises:
        LmiError: a limit, the adapter, the time or the engine; the application's refusals are
            answers.
    """
    application = context.runtime.engine.http
    if application is None:  # another model was loaded since the route was found
        raise NotReadyError("the model is being replaced")
    if route.kind is not RouteKind.INFERENCE:
        return _reply(await application.call(http))
    if context.runtime.has_hooks and "json" in http.headers.get("Content-Type", "json"):
        return await ask(context, http.path.removeprefix("/v1").removeprefix("/"))
    async with context:
        payload = _payload(http.body)
        _check(context, payload)
        await context.hold_adapters(payload)
        if context.adapter is not None:
            http = replace(http, adapter=context.adapter.ref)
        limit = context.silence_limit()
        async with context.deadline():
            answer = await application.call(http)
        reply = _reply(answer)
        if answer.stream is not None:
            context.own_stream(answer.stream)
            stream = event_stream(route, answer.content_type)
            events = context.stream_ends.events(stream.events(answer.stream), stream.error, limit)
            reply = replace(reply, stream=events)
        return context.deliver(reply)


def _check(context: RequestContext, payload: Mapping[str, Any]) -> None:
    """Refuse what asks for too much; some routes keep the sampling in an object of its own."""
    limits = context.runtime.profile.limits
    check_limits(payload, limits)
    if isinstance(nested := payload.get("sampling_params"), dict):
        check_limits(nested, limits, "sampling_params.")
        payload = {**nested, **payload}
    context.take_slots("prompts", sequence_count(payload))


def _payload(body: bytes) -> Mapping[str, Any]:
    """Return the object in a body as the application will read it; nothing of one without.

    orjson is the stricter of the two: it refuses NaN, lone surrogates and UTF-16.
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def _reply(answer: OpenAIReply) -> Reply:
    return Reply(answer.status, answer.content_type, answer.body, answer.stream, answer.headers)
