"""Streamed calls of tools are those of the whole answer.

Keys. vLLM's hermes parser (also `longcat` and `qwen3_json`) looks for `"name"` and `"arguments"`
anywhere in the text of a call, and takes for arguments what comes after. A whole answer is parsed
as JSON. Here a stream finds the same keys, wherever they stand. A call without arguments has `{}`
in both forms.

At the end. The streams of `xlam`, `hunyuan_a13b` and `gigachat3` look for the keys likewise, and
count on one token in a step. A step has several where the server is busy. Here their calls come
with the end of the answer, as vLLM's `phi4_mini_json` has them. What cannot begin a call is
streamed.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: with hermes `{"arguments": {"x": 1}, "name": "f"}` streams the arguments
    `{"x": 1}, "name": "f"`, which are no JSON. An argument that is called `name` and comes first
    is the name of the tool. With xlam, three tokens in a step, arguments begin with `{{`.
May go: when test_plain_vllm_streams_what_comes_after_the_arguments and
    test_plain_vllm_streams_broken_arguments_of_several_tokens fail.
"""

import json
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import regex  # type: ignore[import-untyped,unused-ignore]  # vLLM's: it finds beginnings of a match

from lmi_vllm.engine.vllm.names import DeltaMessage

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,"]', re.DOTALL)
_NONE: Final = "{}"  # arguments


@dataclass(slots=True)
class PartialObject:
    """Where the values of a JSON object's own keys stand, while its text is being written."""

    text: str = ""
    is_closed: bool = False
    # Key -> the first and the last index of its value's text; no last one while it is written.
    values: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    _read: int = 0
    _depth: int = 0
    _key: str = ""

    def read(self, text: str) -> None:
        """Read a text that begins as the one before, from where that was understood."""
        self.text = text
        for token in _TOKEN.finditer(text, self._read):
            if self.is_closed or token[0] == '"':  # that of a text that has no end yet
                return
            self._read = token.end()
            self._follow(token[0], token.start())

    def value(self, key: str) -> str | None:
        """Return the text of a value as far as it is written; none before it begins."""
        first, last = self.values.get(key, (len(self.text), None))
        return self.text[first:last].strip() or None

    def is_whole(self, key: str) -> bool:
        """Whether the value is complete."""
        return self.values.get(key, (0, None))[1] is not None

    def _follow(self, token: str, at: int) -> None:
        is_own = self._depth == 1
        if token in ("{", "["):
            self._depth += 1
        elif token in ("}", "]"):
            self._depth -= 1
            self._end(at if is_own else at + 1)
            self.is_closed = is_own
        elif is_own and token == ",":
            self._end(at)
            self._key = ""
        elif is_own and token == ":" and self._key not in self.values:
            self.values[self._key] = at + 1, None
        elif is_own and token.startswith('"'):
            if self._key in self.values:
                self._end(at + len(token))
            else:
                self._key = _text(token)

    def _end(self, at: int) -> None:
        """Note where a value ends, if one of the object's own does."""
        first, last = self.values.get(self._key, (at, at))
        if self._depth <= 1 and last is None:
            self.values[self._key] = first, at


def _text(literal: str) -> str:
    """Return what a JSON text says; the empty text where it is none."""
    try:
        text = json.loads(literal, strict=False)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


class KeysOfCalls:
    """A mixin for vLLM's hermes parser, whose stream asks it for a call's name and arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._object = PartialObject()

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """As vLLM's; a call without arguments is one."""
        extract = super().extract_tool_calls  # type: ignore[misc]
        filled = self.tool_call_regex.sub(self._filled, model_output)  # type: ignore[attr-defined]
        found = extract(filled, request)
        return found if found.tools_called else extract(model_output, request)

    def _filled(self, match: Any) -> str:
        call = PartialObject()
        call.read(match[1] or match[2] or "")
        if not call.is_closed or "name" not in call.values or "arguments" in call.values:
            return str(match[0])
        inner = call.text.rstrip().removesuffix("}")
        start, end = self.tool_call_start_token, self.tool_call_end_token  # type: ignore[attr-defined]
        return f'{start}{inner}, "arguments": {_NONE}}}{end}'

    def _extract_tool_name(self, tc_json: str) -> str | None:
        """Return the name of a call once it is complete."""
        call = self._read(tc_json)
        return _text(call.value("name") or "") or None if call.is_whole("name") else None

    def _extract_tool_args(self, tc_json: str, is_complete: bool) -> str | None:
        """Return the text of the arguments as far as it is written."""
        call = self._read(tc_json)
        if is_complete and call.is_closed and "arguments" not in call.values:
            return _NONE
        return call.value("arguments")

    def _read(self, text: str) -> PartialObject:
        if not text.startswith(self._object.text):  # the next call
            self._object = PartialObject()
        self._object.read(text)
        return self._object


class CallsAtTheEnd:
    """A mixin for parsers whose streams break calls: `tool_calls.py` reads them at the end."""

    begins: Any  # a pattern of `regex`: what a call begins with

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sent = 0

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, *_: Any, **__: Any
    ) -> Any:
        """Return the new content before anything that may become a call."""
        found = self.begins.search(current_text, partial=True)
        sent, self._sent = self._sent, found.start() if found else len(current_text)
        return DeltaMessage(content=current_text[sent : self._sent]) if self._sent > sent else None


def _at_the_end(begins: str) -> type:
    return type("CallsAtTheEnd", (CallsAtTheEnd,), {"begins": regex.compile(begins)})


# A class of vLLM's -> what goes before it.
_MIXINS: Final = MappingProxyType(
    {
        "Hermes2ProToolParser": KeysOfCalls,
        "xLAMToolParser": _at_the_end(
            r"(?:^|```(?:json)?|\[TOOL_CALLS\]|<tool_call>|</think>)\s*\["
        ),
        "HunyuanA13BToolParser": _at_the_end(r"<tool_calls>\s*\["),
        "GigaChat3ToolParser": _at_the_end(
            r"<\|message_sep\|>|<\|function_call\|>|function call<\|role_sep\|>"
        ),
    }
)


def streaming_whole_calls(tool_parser: type | None) -> type | None:
    """Return the class of a tool parser whose streams have the calls of a whole answer."""
    if tool_parser is None:
        return None
    for kind in tool_parser.__mro__:
        mixin = _MIXINS.get(kind.__name__)
        if mixin and kind.__module__.startswith("vllm.tool_parsers."):
            return type(tool_parser.__name__, (mixin, tool_parser), {})
    return tool_parser
