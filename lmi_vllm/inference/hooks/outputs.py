"""`Output`: an answer, or one piece of a streamed one, as a custom handler returns it."""

import io
import json
from typing import Any, Self

from lmi_vllm.inference.hooks.pair_list import PairList


class Output:
    """A status, properties (content type, further headers) and content."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content = PairList()

    def set_code(self, code: int) -> Self:
        """Set the status."""
        self.code = code
        return self

    def set_message(self, message: str) -> Self:
        """Set the message."""
        self.message = message
        return self

    def add_property(self, key: str, val: str) -> Self:
        """Set a header of the answer."""
        self.properties[key] = val
        return self

    def get_properties(self) -> dict[str, str]:
        """Return all properties."""
        return self.properties

    def error(self, error: str, code: int = 424, message: str = "prediction failure") -> Self:
        """Make this an error."""
        self.code = code
        self.message = message
        self.add_property("Content-Type", "application/json")
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add(self, value: Any, key: str | None = None) -> Self:
        """Append text or bytes as they are, anything else as JSON."""
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, (bytes, bytearray)):
            return self.add_as_json(value, key)
        self.content.add(key, bytes(value))
        return self

    def add_as_string(self, value: str, key: str | None = None) -> Self:
        """Append text."""
        return self.add(value, key)

    def add_as_json(self, val: Any, key: str | None = None) -> Self:
        """Append a value as JSON; numpy's numbers and arrays, and dates, are understood."""
        text = json.dumps(val, ensure_ascii=False, allow_nan=False, default=_plain, indent=2)
        self.content.add(key, text.encode())
        return self

    def add_as_numpy(self, np_list: Any, key: str | None = None) -> Self:
        """Append arrays as .npz."""
        return self.add_as_npz(np_list, key)

    def add_as_npz(self, np_list: Any, key: str | None = None) -> Self:
        """Append arrays as .npz."""
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        file = io.BytesIO()
        numpy.savez(file, *np_list)
        self.content.add(key, file.getvalue())
        return self


def _plain(value: Any) -> Any:
    """Return what JSON can say of a value it does not know."""
    if callable(to_list := getattr(value, "tolist", None)):  # numpy
        return to_list()
    if hasattr(value, "isoformat"):  # dates
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
