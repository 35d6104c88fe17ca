"""Bodies that vLLM's application does not check before it works on them.

Conversations of the Responses API: vLLM tries an invalid item as each of some sixty kinds, and
collects all errors of all items on the event loop. So vLLM's own model reads a long list a few
items at a time, up to the first invalid one. The client may choose a response's id (`request_id`),
and vLLM would put the response in the place of another one that it keeps under that id. It does not
check that it can force a call of a tool (`tool_choice`): without a parser of calls it refuses chats
and messages, and answers a response with text. A response, and the first and last events of its
stream, repeat fields of the request, of any size.

Batches of chats: its documentation says that `stream` must be false or absent, and its code does
not check it. Their `response_format`, and that of prompts that are only rendered, may have the form
of TGI, whose `value` vLLM drops. On the other routes it is read (`inference/request/tgi.py`).

Media as tensors (`features` of /inference/v1/generate) are texts that vLLM unpacks. One that holds
something else is an error of the server there, and no error names the field.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: a body of 2 MB of wrong items blocks the event loop for minutes. A batch of chats with
    `stream` is 200 with the ends of the answers. Without a parser a response with `tool_choice`
    "required" is 200 with a text. `kwargs_data` of "AAAA" is 500, "'int' object has no attribute
    'items'". A `text` of 20 MB is 60 MB of events.
May go: when test_plain_vllm_tries_a_wrong_item_as_each_kind,
    test_plain_vllm_takes_a_batch_of_chats_that_is_to_be_streamed,
    test_plain_vllm_answers_a_forced_call_with_text, test_plain_vllm_repeats_a_field_of_any_size and
    test_plain_vllm_unpacks_media_to_anything fail.
"""

import asyncio
import importlib
import json
from typing import Any, Final

from lmi_vllm.engine.vllm.names import is_mistral_tokenizer
from lmi_vllm.engine.vllm.workarounds.kept_responses import note_request
from lmi_vllm.errors import RequestError
from lmi_vllm.messages import HttpCall

_ITEMS_AT_ONCE: Final = 64  # wrong ones: 0.03 s
_KEPT: Final = ("response_store", "msg_store", "event_store")  # of the handler, by ids
# What a response repeats of its request, and no bound on prompts counts.
_ECHOED: Final = ("metadata", "prompt", "reasoning", "service_tier", "text", "user")
_MOST_ECHOED: Final = 1 << 20  # characters of JSON
_UNREAD: Final = (AttributeError, LookupError, RecursionError, TypeError)  # of vLLM's validators
_PACKING: Final = "vllm.entrypoints.scale_out.token_in_token_out.mm_serde"
_PACKED: Final = ("kwargs_data", "mm_metadata")  # of `features`: a list of texts for each modality


async def check_body(call: HttpCall, conversation: Any, responses: Any) -> None:
    """Check what the application does not.

    `conversation` is vLLM's own model of a request to the Responses API, `responses` its handler.

    Raises:
        RequestError: an item of a conversation is none, its id is that of another response, or a
            call of a tool cannot be forced. A field would be dropped, or is too long to repeat.
    """
    check = _CHECKS.get((call.method, call.path))
    if check is None:
        return
    try:
        payload = json.loads(call.body)
    except (ValueError, RecursionError):
        return  # the application says so
    if isinstance(payload, dict):
        await check(payload, conversation, responses)
        note_request(responses, call.body, payload.get("previous_response_id"))


async def _check_response(payload: dict[str, Any], conversation: Any, responses: Any) -> None:
    for name in _ECHOED:
        if len(json.dumps(payload.get(name))) > _MOST_ECHOED:
            raise RequestError(
                f"{name} is repeated in the answer: it may have {_MOST_ECHOED} characters at most"
            )
    await _check_items(payload, conversation)
    if (forced := _forced(payload.get("tool_choice"))) and not _reads_calls(responses):
        raise RequestError(f"tool_choice={forced} requires --tool-call-parser to be set")
    chosen, kept = payload.get("request_id"), (getattr(responses, name, ()) for name in _KEPT)
    if isinstance(chosen, str) and any(chosen in some for some in kept):
        raise RequestError("request_id: a response with this id exists; give another id, or none")


def _forced(choice: Any) -> str:
    """Return how vLLM names a choice that forces a call in a chat; empty where none is forced."""
    if choice == "required":
        return '"required"'
    if not isinstance(choice, dict):
        return ""
    if choice.get("type") in ("function", "custom"):
        return f'function "{choice.get("name")}"'
    is_one_of = choice.get("type") == "allowed_tools" and choice.get("mode") == "required"
    return '"required"' if is_one_of else ""


def _reads_calls(responses: Any) -> bool:
    """Whether vLLM's handler has a parser of calls, or needs none; the rule of its chats."""
    renderer = getattr(responses, "online_renderer", None)
    return (
        renderer is None
        or getattr(renderer.parser, "tool_parser_cls", None) is not None
        or renderer.use_harmony
        or is_mistral_tokenizer(renderer.renderer.tokenizer)
    )


async def _check_items(payload: dict[str, Any], conversation: Any) -> None:
    items = payload.get("input")
    if not isinstance(items, list) or len(items) <= _ITEMS_AT_ONCE:
        return
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


async def _check_batch(payload: dict[str, Any], *_: Any) -> None:
    if payload.get("stream"):
        raise RequestError("stream: a batch of chats is not streamed; allowed: false")
    await _check_format(payload)


async def _check_features(payload: dict[str, Any], *_: Any) -> None:
    """Unpack what vLLM will unpack, in a thread: it may be of megabytes."""
    features = payload.get("features")
    if isinstance(features, dict) and (problem := await asyncio.to_thread(_not_media, features)):
        raise RequestError(problem)


def _not_media(features: dict[str, Any]) -> str:
    """Return which text is no item of media; empty if all are, or vLLM's models refuse the rest."""
    unpack = importlib.import_module(_PACKING).decode_mm_kwargs_item
    for name in _PACKED:
        lists = features.get(name)
        for kind, packed in lists.items() if isinstance(lists, dict) else ():
            for number, text in enumerate(packed if isinstance(packed, list) else ()):
                try:
                    if isinstance(text, str):
                        unpack(text).get_data()
                except (ValueError, ArithmeticError, RuntimeError, *_UNREAD) as error:
                    place = f"features.{name}.{kind}[{number}]"
                    return f"{place}: it is no packed item of media: {error}"
    return ""


async def _check_format(payload: dict[str, Any], *_: Any) -> None:
    wanted = payload.get("response_format")
    if isinstance(wanted, dict) and wanted.get("value") is not None:
        raise RequestError(
            'response_format.value is not read here: send {"type": "json_schema", "json_schema": '
            '{"name": ..., "schema": ...}}'
        )


_CHECKS: Final = {
    ("POST", "/v1/responses"): _check_response,
    ("POST", "/v1/chat/completions/batch"): _check_batch,
    ("POST", "/v1/chat/completions/render"): _check_format,
    ("POST", "/v1/completions/render"): _check_format,
    ("POST", "/inference/v1/generate"): _check_features,
}
