"""Short ways to make the `Output` of a handler."""

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from lmi_vllm.inference.hooks.outputs import Output


def create_non_stream_output(
    data: str | dict[str, Any],
    properties: dict[str, str] | None = None,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """Return a whole answer; with `error` that of a failed request."""
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
    """Yield an Output for each text of `response`, formatted; a failing formatter ends it."""
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
