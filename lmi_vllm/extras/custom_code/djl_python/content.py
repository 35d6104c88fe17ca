"""What a custom handler is given and what it returns: LMI's `inputs`, `outputs`, `pair_list`."""

import csv
import io
import json
from typing import Any, Self


class PairList:
    """Pairs of key and bytes, in the order they were added."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.values: list[bytes] = []

    def add(self, key: str | None = None, value: bytes = b"") -> None:
        """Append a pair."""
        self.keys.append(key)
        self.values.append(value)

    def size(self) -> int:
        """Return the number of pairs."""
        return len(self.keys)

    def is_empty(self) -> bool:
        """Return whether there is no pair."""
        return not self.keys

    def get(self, key: str | None) -> bytes | None:
        """Return the first value under `key`, None without one."""
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index: int) -> str | None:
        """Return the key at a position."""
        return self.keys[index]

    def value_at(self, index: int) -> bytes:
        """Return the value at a position."""
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        """Return all keys."""
        return self.keys

    def get_values(self) -> list[bytes]:
        """Return all values."""
        return self.values


class RequestContent:
    """A request's content (body, query parameters), and the ways of reading it."""

    def __init__(self) -> None:
        self.content = PairList()

    def is_empty(self) -> bool:
        """Return whether there is no content: the call at the start of the server."""
        return self.content.is_empty()

    def get_content(self) -> PairList:
        """Return the content."""
        return self.content

    def contains_key(self, key: str) -> bool:
        """Return whether there is content under `key`."""
        return self.content.get(key) is not None

    def get_as_bytes(self, key: str | None = None) -> Any:
        """Return the content under `key`, else the body; None when there is no content.

        Raises:
            KeyError: there is nothing under `key`.
        """
        if self.content.is_empty():
            return None
        if key is not None:
            value = self.content.get(key)
            if value is None:
                raise KeyError(f"the request has no content {key}")
            return value
        body = self.content.get("data")
        return self.content.value_at(0) if body is None else body

    def get_as_string(self, key: str | None = None) -> str:
        """Return content decoded as UTF-8."""
        return str(self.get_as_bytes(key).decode("utf-8"))

    def get_as_json(self, key: str | None = None) -> Any:
        """Return content parsed as JSON."""
        return json.loads(self.get_as_bytes(key))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, str]]:
        """Return the rows of a CSV with a header row."""
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))

    def get_as_numpy(self, key: str | None = None) -> list[Any]:
        """Return the array of an .npy content, in a list."""
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        return [numpy.load(io.BytesIO(self.get_as_bytes(key)), allow_pickle=False)]

    def get_as_npz(self, key: str | None = None) -> list[Any]:
        """Return the arrays of an .npz content."""
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        arrays = numpy.load(io.BytesIO(self.get_as_bytes(key)), allow_pickle=False)
        return [arrays[name] for name in arrays.files]

    def get_as_image(self, key: str | None = None) -> Any:
        """Return content as a PIL image."""
        from PIL import Image  # noqa: PLC0415 (only where a hook uses it)

        return Image.open(io.BytesIO(self.get_as_bytes(key)))


class Input(RequestContent):
    """A request: its content, and its properties (headers, options of the model)."""

    def __init__(self) -> None:
        super().__init__()
        self.properties: dict[str, str] = {}
        self.function_name: str | None = None

    def get_function_name(self) -> str | None:
        """Return the name of the handler the request asks for."""
        return self.function_name

    def get_properties(self) -> dict[str, str]:
        """Return all properties."""
        return self.properties

    def get_property(self, key: str) -> str | None:
        """Return a property by its name in any case, None without one."""
        wanted = key.lower()
        return next((v for k, v in self.properties.items() if k.lower() == wanted), None)

    def is_batch(self) -> bool:
        """Return False: requests come one by one, the engine does the batching."""
        return False

    def get_batch_size(self) -> int:
        """Return 1; see `is_batch`."""
        return 1

    def get_batches(self) -> list["Input"]:
        """Return the request in a list of one; see `is_batch`."""
        return [self]

    def get_data(self, key: str | None = None) -> Any:
        """Return content read by the request's content type; bytes for any other type."""
        kind = self.get_property("content-type") or ""
        readers = {
            "tensor/ndlist": self.get_as_numpy,
            "tensor/npz": self.get_as_npz,
            "application/json": self.get_as_json,
            "text/": self.get_as_string,
            "image/": self.get_as_image,
        }
        for start, read in readers.items():
            if kind.startswith(start):
                return read(key)
        return self.get_as_bytes(key)


class Output:
    """A status, properties (content type, further headers) and content."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content = PairList()

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

    def error(self, error: str, code: int = 424, message: str = "prediction failure") -> Self:
        """Make this an error answer with a JSON body; returns self."""
        self.code = code
        self.message = message
        self.add_property("Content-Type", "application/json")
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add(self, value: Any, key: str | None = None) -> Self:
        """Append text or bytes as they are, anything else as JSON; returns self."""
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, (bytes, bytearray)):
            return self.add_as_json(value, key)
        self.content.add(key, bytes(value))
        return self

    def add_as_string(self, value: str, key: str | None = None) -> Self:
        """Append text; returns self."""
        return self.add(value, key)

    def add_as_json(self, val: Any, key: str | None = None) -> Self:
        """Append a value as JSON, numpy's types and dates included; returns self."""
        text = json.dumps(val, ensure_ascii=False, allow_nan=False, default=_plain, indent=2)
        self.content.add(key, text.encode())
        return self

    def add_as_numpy(self, np_list: Any, key: str | None = None) -> Self:
        """Append arrays as .npz; returns self."""
        return self.add_as_npz(np_list, key)

    def add_as_npz(self, np_list: Any, key: str | None = None) -> Self:
        """Append arrays as .npz; returns self."""
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        file = io.BytesIO()
        numpy.savez(file, *np_list)
        self.content.add(key, file.getvalue())
        return self


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
