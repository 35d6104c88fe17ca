"""The OpenAI lane: a payload to vLLM's handler, its answer within our limits and time."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmi_vllm.adapters.selection import adapter_name
from lmi_vllm.inference.request.limits import check_limits, sequence_count
from lmi_vllm.inference.request_work import RequestWork
from lmi_vllm.inference.response.openai_replies import V1_DIALECT, OpenAIDialect, StreamDialect
from lmi_vllm.inference.response.responses_stream import RESPONSES, ResponsesDialect
from lmi_vllm.inference.response.stream_ends import DirectEvents, StreamEnds
from lmi_vllm.inference.response.streams import (
    DirectStream,
    SilenceLimit,
    close_iterator,
    deadline_error,
)
from lmi_vllm.messages import OpenAICall, OpenAIReply


async def ask_openai(
    work: RequestWork,
    kind: str,
    payload: Mapping[str, Any],
    dialect: StreamDialect | None = None,
) -> OpenAIReply:
    """Return the answer of vLLM's handler; a stream comes as `dialect` says, else as on `/v1`.

    Raises:
        LmiError: a limit, the adapter, the time or the engine; vLLM's refusals are answers.
    """
    runtime, call = work.runtime, work.call
    check_limits(payload, runtime.profile.limits)
    if kind != RESPONSES:  # its list of inputs is one conversation
        work.admit_list("prompts", sequence_count(payload))
    name = adapter_name(call, payload, runtime.adapters.__contains__)
    body = {key: value for key, value in payload.items() if key != "adapters"}
    ref = await work.adapter(name)
    if ref is not None:
        body["model"] = ref.name
    if dialect is None:
        dialect = ResponsesDialect() if kind == RESPONSES else V1_DIALECT
    seconds = runtime.profile.predict_timeout
    limit = SilenceLimit(seconds, "predict_timeout")
    direct = DirectEvents(dialect, limit) if isinstance(dialect, OpenAIDialect) else None
    try:
        async with asyncio.timeout(seconds):
            answer = await runtime.engine.answer_openai(
                OpenAICall(kind, body, call.properties, call.request_id, adapter=ref), direct
            )
    except TimeoutError:
        raise deadline_error(seconds, "predict_timeout") from None
    if answer.stream is None:
        return answer
    work.hold.push_async_callback(close_iterator, answer.stream)
    ends = StreamEnds(work.queue, runtime.profile)
    rows = ends.events(dialect.events(answer.stream), dialect, limit)
    if direct is None:
        return replace(answer, stream=rows)
    return replace(answer, stream=DirectStream(rows, direct.connect))
