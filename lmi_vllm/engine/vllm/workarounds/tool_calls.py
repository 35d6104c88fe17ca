"""Tool calls: bound to their schemas where a call is forced, and read alike in both forms when cut.

Bound. `tool_choice` "required" or a function's name forces a call, and vLLM's documentation says
that its arguments match the tool's schema. With parsers that have a grammar of their own (hermes,
for example) that is so only with `strict: true`. Here tools without `strict` are bound, too. With
`false`, and without a schema, the arguments are any object: to vLLM they are any JSON.

Cut. At `max_tokens` a whole answer has the text of the unfinished call as content, and loses the
complete ones before it. A stream has these, and the beginning of the last one. It loses a text that
only may have begun a call. Here a whole answer that was cut is read as a stream, and what
a stream held back comes with its end: as calls for a parser that finds none before, such as
phi4_mini_json. Both end with "length" (DECISIONS.md 137). A stop text cuts, too: both forms have
the beginning of the call then, and end with "stop" (DECISIONS.md 159).

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: with hermes and `required` the arguments of a tool are any JSON, such as `false`. Two calls
    of which the second is cut are text in a whole answer. `finish_reason` of a cut one is
    "tool_calls", and in a stream of `/v1/responses` its status is "completed". `/v1/messages`
    answers a cut call with 400, "Expecting value". A stop text inside of arguments makes a whole
    answer a text that ends with "tool_calls".
May go: when test_plain_vllm_reads_a_cut_call_as_text and
    test_plain_vllm_binds_no_arguments_of_a_forced_call fail.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from partial_json_parser import loads as read_partial
from tokenizers.decoders import DecodeStream

from lmi_vllm.engine.vllm.names import (
    CHAT_OBJECTS,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
)

# The tokens of this request's answers that `max_tokens` or a stop text cut: the objects that vLLM
# reads.
_CUT: Final[ContextVar[tuple[Any, ...]]] = ContextVar("cut answers", default=())
_LENGTH: Final = "length"
_TOOL_CALLS: Final = '"finish_reason":"tool_calls"'  # in an event of a stream
UNREAD: Final = (AttributeError, LookupError, TypeError, ValueError)  # where a call is no JSON
# What says of a schema which kind of value it describes.
_KINDS: Final = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
SINGLE_TOKENS: Final = 256  # at the end of a cut answer, where its last calls are


class CallsReadAlike:
    """A mixin for the class that vLLM composes of its parsers; an answer has an object of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._made = arguments, options
        self._prompt: Any = None
        self._sent = ""  # as content of a stream
        self._has_calls = False

    def set_prompt_token_ids(self, prompt_token_ids: Any) -> None:
        """As vLLM's; a stream's parser gets them with its first step."""
        self._prompt = prompt_token_ids
        super().set_prompt_token_ids(prompt_token_ids)  # type: ignore[misc]

    def _apply_structural_tag(self, request: Any) -> Any:
        """As vLLM's; a forced call is bound to the schema of its tool."""
        apply = super()._apply_structural_tag  # type: ignore[misc]
        if not request.tools or request.tool_choice in (None, "none", "auto"):
            return apply(request)
        bound = apply(request.model_copy(update={"tools": [_bound(one) for one in request.tools]}))
        request.structured_outputs = bound.structured_outputs
        if "text" in type(request).model_fields:  # of the Responses API
            request.text = bound.text
        else:
            request.response_format = bound.response_format
        return request

    def _append_unstreamed_tool_args(self, delta_message: Any) -> None:
        """As vLLM's, but arguments that have not begun are not `{}`."""
        calls = getattr(self._tool_parser, "prev_tool_call_arr", None)  # type: ignore[attr-defined]
        if calls and "arguments" in calls[-1]:
            super()._append_unstreamed_tool_args(delta_message)  # type: ignore[misc]

    def parse(self, model_output: str, *more: Any, **named: Any) -> Any:
        """Read a whole answer; one that was cut is read as a stream of it, if that has a call."""
        parse = super().parse  # type: ignore[misc]
        ids = named.get("model_output_token_ids", ())
        if all(ids is not cut for cut in _CUT.get()):
            return parse(model_output, *more, **named)
        request = named["request"] if "request" in named else more[0]
        if not _may_call(request):
            return parse(model_output, *more, **named)
        read = self._read_as_a_stream(model_output, request, list(ids))
        if not read.calls:
            with contextlib.suppress(*UNREAD):
                return parse(model_output, *more, **named)
        content = "".join(read.content) or None
        return "".join(read.reasoning) or None, content, list(read.calls.values())

    def parse_delta(self, *arguments: Any, **named: Any) -> Any:
        """Read a step of a stream; the last one has what was held back, and became no call."""
        message = super().parse_delta(*arguments, **named)  # type: ignore[misc]
        request = named.get("request")
        if request is None or not self._keeps_text(request):
            return message
        if message is not None:
            self._sent += message.content or ""
            self._has_calls = self._has_calls or bool(message.tool_calls)
        if named["finished"] and not self._has_calls:
            state = self._stream_state  # type: ignore[attr-defined]
            is_begun = state.tool_call_text_started and state.previous_text.startswith(self._sent)
            if is_begun and (rest := state.previous_text[len(self._sent) :]):
                message = message or DeltaMessage()
                message.tool_calls = self._calls_at_the_end(state.previous_text, request)
                if not message.tool_calls:
                    message.content = (message.content or "") + rest
        return message

    def _calls_at_the_end(self, text: str, request: Any) -> list[Any]:
        """Return the calls of a whole text, for parsers that find none while it comes."""
        read = self._tool_parser.extract_tool_calls  # type: ignore[attr-defined]
        try:
            found = read(text, request)
        except UNREAD:  # it is cut
            return []
        return [
            DeltaToolCall(
                index=index, id=call.id, type="function", function=call.function.model_dump()
            )
            for index, call in enumerate(found.tool_calls if found.tools_called else ())
        ]

    def _keeps_text(self, request: Any) -> bool:
        """Whether its state has all text, and what is no call is content."""
        parser = getattr(self, "_tool_parser", None)
        if parser is None or getattr(self, "_engine_based", True) or not _may_call(request):
            return False
        is_json = parser.supports_required_and_named  # that of a forced call
        return not is_json or request.tool_choice in (None, "auto")

    def _read_as_a_stream(self, text: str, request: Any, ids: list[int]) -> "_Read":
        """Return what a stream of this answer has in the end."""
        arguments, options = self._made
        parser: Any = type(self)(*arguments, **options)
        steps, read = self._steps(text, request, ids), _Read()
        for number, (step, tokens) in enumerate(steps, 1):
            is_last = number == len(steps)
            prompt = list(self._prompt or ())
            read.add(
                parser.parse_delta(
                    step, tokens, request=request, prompt_token_ids=prompt, finished=is_last
                )
            )
        return read

    def _steps(self, text: str, request: Any, ids: list[int]) -> list[tuple[str, list[int]]]:
        """Return the steps of a stream: the last tokens one by one, what is before them at once."""
        before, last = ids[:-SINGLE_TOKENS], ids[-SINGLE_TOKENS:]
        tokenizer = getattr(self.model_tokenizer, "_tokenizer", None)  # type: ignore[attr-defined]
        if tokenizer is None:  # Mistral's own
            return [(text, ids)]
        known = [*(self._prompt or ()), *before][-SINGLE_TOKENS:]
        is_skipping = bool(getattr(request, "skip_special_tokens", True))
        stream = DecodeStream(ids=known, skip_special_tokens=is_skipping)
        steps = [(stream.step(tokenizer, number) or "", [number]) for number in last]
        end = "".join(step for step, _ in steps)
        if not before and end != text and end.startswith(text):  # a stop text is left out
            return _within(text, steps)
        start = text.removesuffix(end)
        if len(start) + len(end) != len(text) or bool(start) != bool(before):
            return [(text, ids)]
        return [(start, before), *steps] if before else steps


@dataclass(slots=True)
class _Read:
    """What the messages of a stream are together."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: dict[int, FunctionCall] = field(default_factory=dict)

    def add(self, message: Any) -> None:
        if message is None:
            return
        self.reasoning.append(message.reasoning or "")
        self.content.append(message.content or "")
        for delta in message.tool_calls or ():
            new = FunctionCall(id=delta.id, name="", arguments="")
            call = self.calls.setdefault(delta.index, new)
            if delta.function is not None:
                call.name += delta.function.name or ""
                call.arguments += delta.function.arguments or ""


def _within(text: str, steps: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Return the steps without what comes after a text that they begin with; one at least."""
    kept: list[tuple[str, list[int]]] = []
    for step, ids in steps:
        kept.append((text[: len(step)], ids))
        text = text[len(step) :]
        if not text:
            break
    return kept


def _may_call(request: Any) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


def read_calls_alike(state: Any) -> None:
    """Let all handlers in the state of vLLM's application tell their parsers what was cut."""
    for handler in (state[name] for name in state):
        if hasattr(handler, "chat_completion_full_generator"):
            whole = _chats(handler.chat_completion_full_generator)
            handler.chat_completion_full_generator = whole
            if hasattr(handler, CHAT_OBJECTS):
                handler.chat_completion_stream_generator_raw = _streams(
                    getattr(handler, CHAT_OBJECTS)
                )
            else:
                stream = _streams(handler.chat_completion_stream_generator)
                handler.chat_completion_stream_generator = stream
        if hasattr(handler, "_make_response_output_items"):
            handler._make_response_output_items = _responses(handler._make_response_output_items)
            events = _streamed_responses(handler._process_simple_streaming_events)
            handler._process_simple_streaming_events = events
        if hasattr(handler, "messages_full_converter"):
            handler.messages_full_converter = _messages(handler.messages_full_converter)


def _chats(method: Any) -> Any:
    async def followed(request: Any, outputs: Any, *more: Any, **named: Any) -> Any:
        """As vLLM's; its parsers know what was cut, and `finish_reason` says so."""
        cut: dict[int, Any] = {}
        answer = await method(request, _noted(outputs, cut), *more, **named)
        for choice in getattr(answer, "choices", ()):
            if choice.index not in cut or choice.finish_reason != "tool_calls":
                continue
            reason = cut[choice.index].finish_reason
            calls = [call.function.arguments for call in choice.message.tool_calls or ()]
            if reason == _LENGTH or not _are_complete(calls):
                choice.finish_reason = reason
        return answer

    return followed


def _streams(method: Any) -> Any:
    def followed(request: Any, *more: Any, **named: Any) -> AsyncIterator[Any]:
        """As vLLM's; it ends with "stop" where a stop text cut a call."""
        events: AsyncIterator[Any] = method(request, *more, **named)
        return _stopped(events) if request.stop and _may_call(request) else events

    return followed


async def _stopped(events: Any) -> AsyncIterator[Any]:
    """Yield events of a stream, or the objects that they are made of from 0.33 on."""
    calls: dict[int, dict[int, str]] = {}  # choice -> call -> its arguments
    async with contextlib.aclosing(events):
        async for event in events:
            is_cut = False
            for choice in _choices(event):
                known = calls.setdefault(choice["index"], {})
                for delta in choice["delta"].get("tool_calls") or ():
                    more = (delta.get("function") or {}).get("arguments") or ""
                    known[delta["index"]] = known.get(delta["index"], "") + more
                is_cut = isinstance(choice.get("stop_reason"), str) and not _are_complete(
                    known.values()
                )
            yield _with_stop(event) if is_cut else event


def _choices(event: Any) -> list[Any]:
    if not isinstance(event, str):
        return [choice.model_dump() for choice in getattr(event, "choices", ())]
    with contextlib.suppress(ValueError):  # of the last line, which is no JSON
        return list(json.loads(event.removeprefix("data: ")).get("choices", ()))
    return []


def _with_stop(event: Any) -> Any:
    if isinstance(event, str):
        return event.replace(_TOOL_CALLS, '"finish_reason":"stop"', 1)
    for choice in event.choices:
        if choice.finish_reason == "tool_calls":
            choice.finish_reason = "stop"
    return event


def _responses(method: Any) -> Any:
    def followed(request: Any, output: Any, *more: Any, **named: Any) -> Any:
        """As vLLM's; its parser knows whether the answer was cut, and so does a cut call."""
        _CUT.set((output.token_ids,) if _is_cut(output) else ())
        items = method(request, output, *more, **named)
        if _is_cut(output) and items:
            _say_whether_complete(items[-1])
        return items

    return followed


def _streamed_responses(method: Any) -> Any:
    async def followed(*arguments: Any) -> AsyncIterator[Any]:
        """As vLLM's; the last event of the response has the same items."""
        async with contextlib.aclosing(method(*arguments)) as events:
            async for event in events:
                if event.type == "response.output_item.done":
                    _say_whether_complete(event.item)
                yield event

    return followed


def _say_whether_complete(item: Any) -> None:
    """Give a call the status that its arguments have: a stream does not yet know what ended it."""
    if item.type == "function_call":
        item.status = "completed" if _are_complete([item.arguments]) else "incomplete"


def _messages(method: Any) -> Any:
    def followed(answer: Any) -> Any:
        """As vLLM's, which fails where the arguments of a call are no JSON."""
        for call in answer.choices[0].message.tool_calls:
            call.function.arguments = _as_object(call.function.arguments)
        return method(answer)

    return followed


async def _noted(outputs: Any, cut: dict[int, Any]) -> AsyncIterator[Any]:
    """Yield the outputs, and note the answers among them that were cut."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            for one in output.outputs:
                if _is_cut(one):
                    cut[one.index] = one
            _CUT.set(tuple(one.token_ids for one in cut.values()))
            yield output


def _is_cut(output: Any) -> bool:
    """Whether `max_tokens` or a stop text ended an answer, and not the model."""
    return output.finish_reason == _LENGTH or isinstance(output.stop_reason, str)


def _are_complete(arguments: Iterable[str]) -> bool:
    """Whether there are calls, and the arguments of each are JSON."""
    texts = list(arguments)
    with contextlib.suppress(ValueError):
        return bool(texts) and all(json.loads(text) is not None for text in texts)
    return False


def _bound(tool: Any) -> Any:
    """Return a tool whose arguments are bound: to its schema, or to any object if it is not strict.

    A schema that does not say so is one of an object.
    """
    owner = getattr(tool, "function", tool)  # of a chat, of the Responses API
    if not hasattr(owner, "strict"):  # of a tool that is no function
        return tool
    schema = {} if owner.strict is False else owner.parameters or {}
    if schema.keys().isdisjoint(_KINDS):
        schema = {**schema, "type": "object"}
    bound = owner.model_copy(update={"strict": True, "parameters": schema})
    return bound if owner is tool else tool.model_copy(update={"function": bound})


def _as_object(arguments: str) -> str:
    """Return arguments as a JSON object, as Anthropic's blocks have; what was cut is left out."""
    read: Any = None
    try:
        read = json.loads(arguments)
    except ValueError:
        with contextlib.suppress(ValueError):
            read = read_partial(arguments)
    return json.dumps(read if isinstance(read, dict) else {}, ensure_ascii=False)
