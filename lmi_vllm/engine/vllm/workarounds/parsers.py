"""vLLM's parsers of tool calls and reasoning: slow ones are bounded, failing ones seen in time.

Slow parsers. They read the answer on the event loop, so every client waits meanwhile. A client can
make the model write a text that is slow for them: a start token repeated, calls that are never
closed. Some are slow by a regular expression (of `re` or `regex`), some by a loop in Python, and a
stream reads its whole text again for each token. So each of them has a limit: a timer's signal,
whose handler raises. Both libraries of regular expressions look for signals while they match. Only
the main thread can be interrupted, and the server's event loop is there. In another thread the
error comes once the parser is done.

Grows with the square of the text or worse, measured with 400 repetitions: the tool parsers `dots`,
`gemma4` (1 s or more for 1600), `deepseek_v3`, `deepseek_v31`, `ernie45`, `hunyuan_a13b`, `jamba`,
`mistral`, `muse_glimmer`, `olmo3`, `poolside_v1`, and the reasoning parsers `gemma4`,
`hunyuan_a13b`, `mistral`, `muse_glimmer`. In a stream also `llama3_json`, `pythonic` and `xlam`.
Counting the reasoning tokens of 16000 tokens takes `inkling` 1.7 s, and `gemma4` 1.4 s. Whether
reasoning has ended is found in linear time by all of them: 0.5 us a token or less.

Failing parsers. Where an answer is bound by a grammar, vLLM's engine makes the server's reasoning
parser within its own step, to see when the grammar begins. It makes it of fields of the request,
and of the tokenizer. An exception there ends the engine with all requests, so such a request is
refused before.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: `<dots_function_call>` and the beginning of a call, 800 times in an answer, take 0.9 s and
    four times that for each doubling, in which no client gets a token. `/inference/v1/generate`
    with a grammar ends the engine that has the reasoning parser `k2_horizon`, by
    `reasoning_effort` "none" in `reasoning_parser_kwargs`. With `deepseek_r1` and a tokenizer
    without `<think>` a grammar alone does.
May go: when test_plain_vllm_parser_takes_the_square_of_its_text fails, and
    integration/hostile_fields.py holds without it.
"""

import functools
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from lmi_vllm.engine.vllm.names import ReasoningParserManager, VLLMValidationError
from lmi_vllm.engine.vllm.workarounds.call_streams import streaming_whole_calls
from lmi_vllm.engine.vllm.workarounds.tool_calls import CallsReadAlike
from lmi_vllm.telemetry.records import current_record

SECONDS: Final = 1.0  # processor time that the parsers of one request may take
# A step of a stream that is this short does not count: there are thousands.
SHORT_STEP_SECONDS: Final = 0.05
TOO_SLOW: Final = (
    "the answer could not be read for tool calls and reasoning in time: reading it took more than "
    f"{SECONDS:g} s, in which other requests wait"
)


class _Rang(BaseException):
    """The time is over: no `Exception`, since most parsers catch each of those, and go on."""


@dataclass(slots=True)
class Alarm:
    """Interrupts a call in the main thread; one for an application."""

    end: float | None = None  # of the running call, as of `time.thread_time()`

    def call(self, seconds: float, read: Callable[[], Any]) -> Any:
        """Return what `read` returns.

        Raises:
            ValueError: it used more than `seconds` of processor time.
        """
        if threading.current_thread() is not threading.main_thread():
            return read()
        signal.signal(signal.SIGALRM, self._ring)  # stays: a late signal must find a handler
        try:
            return self._read(seconds, read)
        except _Rang:
            raise ValueError(TOO_SLOW) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _read(self, seconds: float, read: Callable[[], Any]) -> Any:
        self.end = time.thread_time() + seconds
        try:
            # Again and again: a thread that had to wait for its processor has time left at first.
            signal.setitimer(signal.ITIMER_REAL, seconds, SECONDS / 10)
            return read()
        finally:  # at once: no signal is handled between the end of `read` and this
            self.end = None

    def _ring(self, *_: object) -> None:
        if self.end is not None and time.thread_time() > self.end:
            raise _Rang


class LimitedParser:
    """A mixin for the class that vLLM composes of its parsers; an answer has an object of it.

    Its methods are vLLM's, within the request's time. `ValueError`, vLLM's sign of a bad request,
    says that they took longer.
    """

    alarm: Alarm

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.record: Any = current_record() or SimpleNamespace(parser_seconds=0.0)

    def parse(self, *arguments: Any, **options: Any) -> Any:
        """Read a whole answer."""
        return self._limited(0.0, super().parse, *arguments, **options)  # type: ignore[misc]

    def parse_delta(self, *arguments: Any, **options: Any) -> Any:
        """Read a step of a stream; short ones do not count."""
        read = super().parse_delta  # type: ignore[misc]
        return self._limited(SHORT_STEP_SECONDS, read, *arguments, **options)

    def count_reasoning_tokens(self, *arguments: Any) -> Any:
        """Count an answer's, which may read all of it again; in a stream for each event."""
        read = super().count_reasoning_tokens  # type: ignore[misc]
        return self._limited(SHORT_STEP_SECONDS, read, *arguments)

    def _limited(self, uncounted: float, read: Any, *arguments: Any, **options: Any) -> Any:
        if self.alarm.end is not None:  # one method of vLLM's calls the other
            return read(*arguments, **options)
        self._charge(0)
        began = time.thread_time()
        try:
            left = SECONDS - self.record.parser_seconds
            return self.alarm.call(left, functools.partial(read, *arguments, **options))
        finally:
            spent = time.thread_time() - began
            self._charge(spent if spent > uncounted else 0)

    def _charge(self, seconds: float) -> None:
        self.record.parser_seconds += seconds
        if self.record.parser_seconds >= SECONDS:
            raise ValueError(TOO_SLOW)


def limited(parser: type, alarm: Alarm) -> type:
    """Return the class of a parser whose answers have a limited time, and calls read alike."""
    read = streaming_whole_calls(getattr(parser, "tool_parser_cls", None))
    own = {"alarm": alarm, "tool_parser_cls": read}
    return type(parser.__name__, (LimitedParser, CallsReadAlike, parser), own)


def limit_parsers(state: Any) -> None:
    """Limit the parsers of all handlers in the state of vLLM's application."""
    alarm = Alarm()
    for handler in (state[name] for name in state):
        if hasattr(getattr(handler, "parser_cls", None), "parse_delta"):  # of chat and messages
            handler.parser_cls = limited(handler.parser_cls, alarm)
        if hasattr(getattr(handler, "parser", None), "parse_delta"):
            handler.parser = limited(handler.parser, alarm)


def check_reasoning(llm: Any, prompt: Any, options: Mapping[str, Any]) -> None:
    """Check that the engine can find out whether a request's prompt ends in reasoning.

    Raises:
        VLLMValidationError: its fields, or the tokenizer, do not fit the server's parser.
    """
    config = llm.vllm_config.structured_outputs_config
    if not config.reasoning_parser or options.get("reasoning_ended"):
        return
    fields = options.get("reasoning_parser_kwargs") or {}
    try:  # as the engine's StructuredOutputManager does
        kind = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
        parser = kind(tokenizer=llm.renderer.tokenizer, **fields)
        parser.is_reasoning_end(prompt.get("prompt_token_ids") or [])
    except Exception as error:  # vLLM's own, of many kinds
        raise VLLMValidationError(f"the server's reasoning parser fails: {error}") from error
