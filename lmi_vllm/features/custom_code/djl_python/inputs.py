"""LMI's `inputs`: what a custom handler is given."""

import csv
import io
import json
from typing import Any

from lmi_vllm.features.custom_code.djl_python.ndlist import from_nd_list
from lmi_vllm.features.custom_code.djl_python.pair_list import PairList


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
        """Return the arrays of DJL's NDList, of an .npz or of an .npy.

        Raises:
            ValueError: the content is none of them.
        """
        return from_nd_list(self.get_as_bytes(key))

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

    def __str__(self) -> str:
        return f"properties: {self.properties}; content: {self.content.get_keys()}"

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
