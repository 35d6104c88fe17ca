"""The OpenAI lane: passes a payload to vLLM's handler, within our limits."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.inference.context import RequestContext, Runtime
from lmi_vllm.inference.request.limits import check_limits, sequence_count
from lmi_vllm.inference.request.tgi import with_openai_format
from lmi_vllm.inference.response.openai_events import (
    RESPONSES,
    V1_EVENTS,
    EventStream,
    FramedEvents,
    ResponsesEvents,
)
from lmi_vllm.inference.response.streams import DirectEventWriter
from lmi_vllm.masked_urls import mask_urls
from lmi_vllm.messages import InferenceCall, OpenAICall, OpenAIReply, Reply


async def ask_openai(
    context: RequestContext,
    kind: str,
    payload: Mapping[str, Any],
    stream: EventStream | None = None,
    *,
    is_direct: bool = True,
) -> OpenAIReply:
    """Return the answer of vLLM's handler; `stream` converts its events, by default as on `/v1`.

    With `is_direct` events may be written directly to the client.

    Raises:
        LmiError: a limit, the adapter, the time or the engine; vLLM's refusals are answers.
    """
    engine, call = context.runtime.engine, context.call
    check_limits(payload, context.runtime.profile.limits)
    if kind != RESPONSES:  # its list of inputs is one conversation
        context.take_slots("prompts", sequence_count(payload))
    body = with_openai_format(dict(payload), is_tgi=context.runtime.profile.tgi_compat)
    body.pop("adapters", None)
    ref = None if context.adapter is None else context.adapter.ref
    if model := context.base_name if ref is None else ref.name:
        body["model"] = model
    stream = stream or (ResponsesEvents() if kind == RESPONSES else V1_EVENTS)
    limit = context.silence_limit()
    direct = None
    if is_direct and isinstance(stream, FramedEvents):
        direct = DirectEventWriter(limit, stream.event)
    openai = OpenAICall(kind, body, call.properties, call.request_id, adapter=ref)
    answer = await limit.within(engine.answer_openai(openai, direct))
    if answer.stream is None:
        return answer
    context.own_stream(answer.stream, None if direct is None else direct.connect)
    events = context.stream_ends.events(stream.events(answer.stream), stream.error, limit)
    return replace(answer, stream=events)


async def list_models(runtime: Runtime, call: InferenceCall) -> Reply:
    """Return vLLM's list of models with the adapters, which vLLM does not know."""
    answer = await runtime.engine.answer_openai(
        OpenAICall("models", {}, call.properties, call.request_id)
    )
    body = with_reference(answer.body, runtime.profile.model_reference)
    return Reply(answer.status, answer.content_type, with_adapters(body, runtime.adapters))


def with_reference(body: bytes, reference: str) -> bytes:
    """Return a list of models whose root is what the user named: the engine knows only a folder."""
    if not reference:
        return body
    document = orjson.loads(body)
    for card in document.get("data", ()):
        card["root"] = reference
    return orjson.dumps(document)


def with_adapters(body: bytes, adapters: Iterable[Adapter]) -> bytes:
    """Return a list of models with one card per adapter, in the shape of the base model's card."""
    listed = tuple(adapters)
    if not listed:
        return body
    document = orjson.loads(body)
    cards = document.setdefault("data", [])
    base = cards[0] if cards else {"object": "model"}
    cards += [
        {
            **base,
            "id": adapter.name,
            "root": mask_urls(adapter.src),
            "parent": base.get("id"),
            "max_model_len": None,
        }
        for adapter in listed
    ]
    return orjson.dumps(document)
