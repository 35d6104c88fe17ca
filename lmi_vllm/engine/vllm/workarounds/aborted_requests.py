"""Requests that the engine ends before their answer is complete.

vLLM's engine core aborts them when it is paused, put to sleep or told to end. Its server answers
with what there is and 200: the finish reason `abort`, which OpenAI's clients do not know, and
`[DONE]`. Here they fail, whatever asked for them: a 500, or an error as the last row of a stream.
An abort that the server's own client asks for is another thing, and stays: a disconnect, and
`POST /abort_requests`, which returns what there is. `outputs` calls this before vLLM's output
processor, which ends with an assertion, and every request with it, where a vector is aborted.

Upstream: https://github.com/vllm-project/vllm/issues/57082.
Releases: 0.31 and later.
Shows: a cut answer that nothing tells from a whole one.
May go: when test_plain_vllm_takes_a_paused_request_for_complete fails.
"""

from http import HTTPStatus
from typing import Any, Final

from lmi_vllm.engine.vllm.names import FinishReason, GracefulHTTPError

ABORTED: Final = (
    "the engine ended this request before its answer was complete: it was paused, put to sleep or "
    "stopped"
)


def without_aborted(processor: Any, outputs: list[Any]) -> list[Any]:
    """Return the outputs but for those of aborted requests, whose readers get an error.

    `processor` is vLLM's output processor, which forgets them.
    """
    aborted = [output for output in outputs if output.finish_reason == FinishReason.ABORT]
    if not aborted:
        return outputs
    for output in aborted:
        if (state := processor.request_states.get(output.request_id)) is None:
            continue  # a sequence of an answer that has ended
        whole = state if state.parent_req is None else state.parent_req
        processor.abort_requests([whole.request_id], internal=True)
        if state.queue is not None:
            # vLLM drops the text of other errors of its queues.
            state.queue.put(GracefulHTTPError(ABORTED, HTTPStatus.INTERNAL_SERVER_ERROR))
    return [output for output in outputs if output.finish_reason != FinishReason.ABORT]
