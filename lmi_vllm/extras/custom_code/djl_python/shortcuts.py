"""LMI's `encode_decode` and `async_utils`: short ways to read a request and to make an answer."""

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from lmi_vllm.extras.custom_code.djl_python.content import Input, Output

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
        return _decode_csv(inputs, key, is_checked=require_csv_headers)
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
    """Append a prediction as .npz for a `tensor/` content type, else as JSON."""
    if content_type and "tensor/" in content_type:
        outputs.add_as_npz(prediction, key)
        outputs.add_property("Content-Type", "tensor/npz")
        return
    outputs.add_as_json(prediction, key)
    outputs.add_property("Content-Type", "application/json")


def _decode_csv(inputs: Input, key: str | None, *, is_checked: bool) -> dict[str, Any]:
    rows = inputs.get_as_csv(key)
    names = set(rows[0]) if rows else set()
    if is_checked and not names & set(_CSV_COLUMNS):
        raise ValueError(f"the CSV needs a header row with one of {', '.join(_CSV_COLUMNS)}")
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in names else rows}


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
