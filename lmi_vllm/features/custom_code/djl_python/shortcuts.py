"""LMI's `encode_decode` and `async_utils`: short ways to read a request and to make an answer."""

import csv
import io
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.djl_python.outputs import Output

_CSV_COLUMNS = ("inputs", "question", "context")


def decode(
    inputs: Input,
    content_type: str | None,
    key: str | None = None,
    require_csv_headers: bool = True,
) -> Any:
    """Return the payload; content that is neither JSON nor text goes under `inputs`.

    Raises:
        ValueError: the content does not parse as its content type.
    """
    kind = content_type or ""
    if not kind:
        return inputs.get_as_json(key) if inputs.get_as_bytes(key) else {"inputs": ""}
    if "application/json" in kind:
        return inputs.get_as_json(key)
    if "text/csv" in kind:
        return decode_csv(inputs, require_csv_headers, key)
    if "text/plain" in kind:
        return {"inputs": [inputs.get_as_string(key)]}
    readers = {
        "image/": inputs.get_as_image,
        "tensor/npz": inputs.get_as_npz,
        "tensor/ndlist": inputs.get_as_numpy,
        "application/x-npy": inputs.get_as_numpy,
        "application/x-www-form-urlencoded": inputs.get_as_string,
    }
    found = (read for start, read in readers.items() if kind.startswith(start))
    return {"inputs": next(found, inputs.get_as_bytes)(key)}


def encode(
    outputs: Output, prediction: Any, content_type: str | None, key: str | None = None
) -> None:
    """Append a prediction as its content type says: JSON, CSV, .npz, or else DJL's NDList."""
    if not content_type or "application/json" in content_type:
        outputs.add_as_json(prediction, key)
        outputs.add_property("Content-Type", "application/json")
    elif "text/csv" in content_type:
        outputs.add(encode_csv(prediction), key)
        outputs.add_property("Content-Type", "text/csv")
    elif "tensor/npz" in content_type:
        outputs.add_as_npz(prediction, key)
        outputs.add_property("Content-Type", "tensor/npz")
    else:
        outputs.add_as_numpy(prediction, key)
        outputs.add_property("Content-Type", "tensor/ndlist")


def decode_csv(inputs: Input, require_headers: bool = True, key: str | None = None) -> Any:
    """Return the rows of a CSV under `inputs`; without headers its numbers as an array.

    Raises:
        ValueError: there is no known column, or without headers something is no number.
    """
    if not require_headers:
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        numbers = numpy.genfromtxt(io.StringIO(inputs.get_as_string(key)), delimiter=",")
        if numpy.isnan(numbers).any():
            raise ValueError("the CSV has something else than numbers")
        return numbers
    rows = inputs.get_as_csv(key)
    names = set(rows[0]) if rows else set()
    if not {str(name).lower() for name in names} & set(_CSV_COLUMNS):
        raise ValueError(f"the CSV needs a header row with one of {', '.join(_CSV_COLUMNS)}")
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in names else rows}


def encode_csv(content: Any) -> str:
    """Return rows, each a dict, as a CSV with a header row."""
    rows = [*content]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*rows[0]] if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def create_non_stream_output(
    data: str | dict[str, Any],
    properties: dict[str, str] | None = None,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """Return a complete answer; with `error` an error answer, 424 unless `code` is given."""
    output = _output(data, "application/json", error, code)
    for name, value in (properties or {}).items():
        output.add_property(name, value)
    return output


def create_stream_chunk_output(
    data: str | dict[str, Any],
    last_chunk: bool,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """Return one line of a streamed answer; the stream ends with its generator, not with a flag."""
    _ = last_chunk
    return _output(data, "application/jsonlines", error, code)


async def handle_streaming_response(
    response: AsyncGenerator[str, None],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **kwargs: Any,
) -> AsyncGenerator[Output, None]:
    """Yield an Output for each formatted text of `response`; a formatter's error ends it."""
    history: list[Any] = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, is_last, history = stream_output_formatter(chunk, history=history, **kwargs)
            else:
                data, is_last = stream_output_formatter(chunk, **kwargs)
        except Exception as error:  # noqa: BLE001 (user code)
            yield create_stream_chunk_output("", True, error=str(error), code=424)
            return
        yield create_stream_chunk_output(data, is_last)
        if is_last:
            return


def _output(
    data: str | dict[str, Any], content_type: str, error: str | None, code: int | None
) -> Output:
    output = Output(code or (424 if error else 200))
    output.add_property("Content-Type", content_type)
    if error:
        data = {"error": error, "code": output.code}
    if isinstance(data, dict):
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return output.add(data + "\n", "data")
