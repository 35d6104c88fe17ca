"""LMI's `streaming_utils`: streams of a model of Transformers that a handler has loaded."""

import logging
from collections.abc import Callable, Iterator
from queue import Queue
from threading import Thread
from typing import Any, Final

logger = logging.getLogger(__name__)

_END: Final = None


class HFStreamer:
    """A streamer for `model.generate`: an iterator over lists of texts, one for each prompt."""

    def __init__(self, tokenizer: Any, **decode_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.decode_kwargs = decode_kwargs
        self.started = False
        self.queue: Queue[Any] = Queue()

    def put(self, value: Any) -> None:
        """Take the ids of one step; the first are those of the prompts."""
        self.started = True
        rows = [value] if len(value.shape) == 1 else value
        self.queue.put([self.tokenizer.decode(row, **self.decode_kwargs) for row in rows])

    def put_text(self, value: Any) -> None:
        """Take a text as it is."""
        self.queue.put(value)

    def end(self) -> None:
        """End the iterator."""
        self.queue.put(_END)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        value = self.queue.get()
        if value is _END:
            raise StopIteration
        return value


class _NewTokens(HFStreamer):
    """A streamer without the prompts, with one text for each prompt at each step."""

    def put(self, value: Any) -> None:
        """Take the ids of one step."""
        if not self.started:
            self.started = True
            return
        self.queue.put([self.tokenizer.decode([row], **self.decode_kwargs) for row in value])


class StreamingUtils:
    """How LMI's handlers stream."""

    DEFAULT_MAX_NEW_TOKENS = 50
    BUILTIN_ENGINES = frozenset({"Accelerate"})

    @staticmethod
    def use_hf_default_streamer(
        model: Any, tokenizer: Any, inputs: Any, device: Any, **kwargs: Any
    ) -> HFStreamer:
        """Return a streamer that a thread fills with what the model generates."""
        return _generate(
            HFStreamer(tokenizer, skip_special_tokens=True), model, inputs, device, kwargs
        )

    @staticmethod
    def get_stream_generator(execution_engine: str) -> Callable[..., Iterator[Any]]:
        """Return the function that streams the texts of a model, a list for each step.

        Raises:
            ValueError: the engine is not Accelerate.
        """
        if execution_engine not in StreamingUtils.BUILTIN_ENGINES:
            raise ValueError(f"{execution_engine} engine is not supported for streaming")
        return _stream


def _stream(
    model: Any, tokenizer: Any, inputs: Any, device: Any = None, **kwargs: Any
) -> Iterator[Any]:
    given = {"max_new_tokens": StreamingUtils.DEFAULT_MAX_NEW_TOKENS, **kwargs}
    return iter(_generate(_NewTokens(tokenizer), model, inputs, device, given))


def _generate(
    streamer: HFStreamer, model: Any, inputs: Any, device: Any, kwargs: dict[str, Any]
) -> HFStreamer:
    tokenizer = streamer.tokenizer
    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.eos_token
    tokens = tokenizer(inputs, padding=True, return_tensors="pt")
    tokens = tokens.to(model.device if device is None else device)

    def run() -> None:
        try:
            model.generate(**tokens, streamer=streamer, **kwargs)
        except Exception as error:
            logger.warning("stream generation failed", exc_info=error)
            streamer.put_text(str(error))
        finally:
            streamer.end()

    Thread(target=run, name="stream-generation", daemon=True).start()
    return streamer
