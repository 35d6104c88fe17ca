"""LMI's `outputs`: what a handler returns."""

import io
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final, Self

from lmi_vllm.features.custom_code.djl_python.ndlist import to_nd_list
from lmi_vllm.features.custom_code.djl_python.pair_list import PairList

_BATCH: Final = "batch_"


class Encoded(bytearray):
    """What `binary_encode` returns: LMI's bytes of an answer, and the answer itself."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(struct.pack(">h", len(answer)))
        self.answer = {key: str(value) for key, value in answer.items()}
        for key, value in self.answer.items():
            for text in (key.encode(), value.encode()):
                self.extend(struct.pack(">i", len(text)) + text)

    @property
    def code(self) -> int | None:
        """The HTTP status of an answer that is an error."""
        code = self.answer.get("code", "")
        return int(code) if code.isdecimal() else None

    @property
    def content(self) -> bytes:
        """The bytes for the client: the text under `data`, or the error."""
        if (data := self.answer.get("data")) or "error" not in self.answer:
            return (data or "").encode()
        error = {"error": self.answer["error"], "code": self.code or 424}
        return json.dumps(error, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _as_outputs(token_texts: Any) -> bytes:
    """Return a row of LMI's default stream format."""
    return json.dumps({"outputs": token_texts}).encode() + b"\n"


class Output:
    """A status, properties (content type, further headers) and content, whole or as a stream."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content = PairList()
        self.stream_content: Any = None
        self.stream_output_formatter: Callable[[Any], Any] | None = None
        self.finalize_function: Callable[..., Any] | None = None
        self.finalize_args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        content = self.content
        kinds = {
            content.key_at(i): f"type: {type(content.value_at(i))}" for i in range(content.size())
        }
        shown = {"code": self.code, "message": self.message, "properties": self.properties}
        return json.dumps({**shown, "content": kinds}, indent=2, default=str)

    def set_code(self, code: int) -> Self:
        """Set the HTTP status; returns self."""
        self.code = code
        return self

    def set_message(self, message: str) -> Self:
        """Set the message; returns self."""
        self.message = message
        return self

    def add_property(self, key: str, val: str) -> Self:
        """Set a header of the answer; returns self."""
        self.properties[key] = val
        return self

    def get_properties(self) -> dict[str, str]:
        """Return all properties."""
        return self.properties

    def get_property(self, key: str) -> str | None:
        """Return a property, None without one."""
        return self.properties.get(key)

    def error(self, error: str, code: int = 424, message: str = "prediction failure") -> Self:
        """Make this an error answer with a JSON body; returns self."""
        self.code = code
        self.message = message
        self.add_property("Content-Type", "application/json")
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Self:
        """Append text or bytes as they are, anything else as JSON; returns self.

        `batch_index` is 0: a handler gets requests one by one.

        Raises:
            ValueError: another index.
        """
        if batch_index:
            raise ValueError(
                f"batch_index {batch_index}: requests come one by one, in batches of 1"
            )
        if batch_index is not None:
            key = f"{_BATCH}0.{key or ''}"
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, bytes | bytearray):
            value = _json(value)
        self.content.add(key, value if isinstance(value, Encoded) else bytes(value))
        return self

    def add_as_string(
        self, value: str, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        """Append text; returns self."""
        return self.add(value, key, batch_index)

    def add_as_json(self, val: Any, key: str | None = None, batch_index: int | None = None) -> Self:
        """Append a value as JSON, numpy's types and dates included; returns self."""
        return self.add(_json(val), key, batch_index)

    def add_as_numpy(
        self, np_list: Any, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        """Append arrays as DJL's NDList; returns self."""
        return self.add(to_nd_list(np_list), key, batch_index)

    def add_as_npz(
        self, np_list: Any, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        """Append arrays as .npz; returns self."""
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        file = io.BytesIO()
        numpy.savez(file, *np_list)
        return self.add(file.getvalue(), key, batch_index)

    def add_stream_content(
        self,
        stream_content: Iterable[Any] | AsyncIterator[Any],
        output_formatter: Callable[[Any], Any] | None = _as_outputs,
    ) -> Self:
        """Stream the items of an iterator, each after `output_formatter`; returns self."""
        is_async = isinstance(stream_content, AsyncIterator)
        items: Any = stream_content
        self.stream_content = items if is_async else iter(items)
        self.stream_output_formatter = output_formatter
        return self

    def streamed(self, item: Any) -> bytes:
        """Return the bytes of one item of the stream."""
        made = item if self.stream_output_formatter is None else self.stream_output_formatter(item)
        made = made.encode() if isinstance(made, str) else made
        return bytes(made) if isinstance(made, bytes | bytearray) else _json(made)

    @staticmethod
    def binary_encode(data: Mapping[str, Any]) -> Encoded:
        """Return an answer as LMI's server reads it: `data`, `last`, and the `code` of an error."""
        return Encoded(data)

    def finalize(self, finalize_function: Callable[..., Any], *args: Any) -> Self:
        """Call the function once the answer is complete; returns self."""
        self.finalize_function, self.finalize_args = finalize_function, args
        return self

    def execute_finalize(self) -> Any:
        """Call the function of `finalize`, if there is one."""
        return self.finalize_function(*self.finalize_args) if self.finalize_function else None


def _json(value: Any) -> bytes:
    """Return a value as indented JSON.

    Raises:
        TypeError: JSON cannot hold it.
        ValueError: a number is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, indent=2)
    return text.encode()


def _plain(value: Any) -> Any:
    """Return numpy's types and dates as plain JSON values.

    Raises:
        TypeError: any other value.
    """
    if callable(to_list := getattr(value, "tolist", None)):  # numpy
        return to_list()
    if hasattr(value, "isoformat"):  # dates
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
