"""Bodies that vLLM's application reads for minutes, or answers wrongly.

Conversations of the Responses API. vLLM tries an invalid item as each of some sixty kinds, and
collects all errors of all items on the event loop. So vLLM's own model reads a long list a few
items at a time, up to the first invalid one.

Batches of chats. With `stream` vLLM answers each of them with its last tokens only, as 200. Its
documentation says that `stream` must be false or absent, and its code does not check it.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: a body of 2 MB of wrong items blocks the event loop for minutes. A batch of chats with
    `stream` is 200 with the ends of the answers.
May go: when test_plain_vllm_tries_a_wrong_item_as_each_kind and
    test_plain_vllm_takes_a_batch_of_chats_that_is_to_be_streamed fail.
"""

import asyncio
import json
from typing import Any, Final

from lmi_vllm.errors import RequestError
from lmi_vllm.messages import HttpCall

_RESPONSES: Final = "/v1/responses"
_BATCH: Final = "/v1/chat/completions/batch"
_ITEMS_AT_ONCE: Final = 64  # wrong ones: 0.03 s
_UNREAD: Final = (AttributeError, LookupError, RecursionError, TypeError)  # of vLLM's validators


async def check_body(call: HttpCall, conversation: Any) -> None:
    """Check a body that the application would read for minutes, or answer wrongly.

    `conversation` is vLLM's own model of a request to the Responses API.

    Raises:
        RequestError: an item of a conversation is none, or a batch of chats is to be streamed.
    """
    if call.method != "POST" or call.path not in {_RESPONSES, _BATCH}:
        return
    try:
        payload = json.loads(call.body)
        items, streams = payload.get("input"), payload.get("stream")
    except (ValueError, AttributeError, RecursionError):
        return  # the application says so
    if call.path == _RESPONSES and isinstance(items, list) and len(items) > _ITEMS_AT_ONCE:
        await _check_items(items, conversation)
    elif call.path == _BATCH and streams:
        raise RequestError("stream: a batch of chats is not streamed; allowed: false")


async def _check_items(items: list[object], conversation: Any) -> None:
    for first in range(0, len(items), _ITEMS_AT_ONCE):
        some = items[first : first + _ITEMS_AT_ONCE]
        try:
            conversation.model_validate({"input": some})
        except (ValueError, *_UNREAD) as error:  # of pydantic, and of validators
            last = first + len(some)
            raise RequestError(
                f"input: one of the items {first + 1} to {last} is none of the Responses API"
            ) from error
        await asyncio.sleep(0)
