"""The bare server of `integration.bench.direct`: `direct_server generate|core PORT`."""

import asyncio
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import orjson
import uvloop
from aiohttp import web
from tokenizers import Tokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from integration.bench.servers import engine_arguments
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.features.token_lane.decoding import tables_for

ROWS = {"Content-Type": "application/jsonlines"}


def row(token: int, text: str) -> bytes:
    """Return LMI's row of a token."""
    return orjson.dumps({"token": {"id": token, "text": text, "log_prob": None}}) + b"\n"


def parameters(body: dict[str, Any]) -> SamplingParams:
    """Return vLLM's parameters of a request."""
    asked = body["parameters"]
    return SamplingParams(
        max_tokens=asked["max_new_tokens"],
        ignore_eos=asked.get("ignore_eos_token", False),
        temperature=asked.get("temperature", 0.0),
        output_kind=RequestOutputKind.DELTA,
    )


class Generate:
    """Rows by way of `AsyncLLM.generate`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer with a row for each token."""
        body = orjson.loads(await request.read())
        response = web.StreamResponse(headers=ROWS)
        await response.prepare(request)
        number = str(uuid.uuid4())
        async for output in self._llm.generate(body["inputs"], parameters(body), number):
            for part in output.outputs:
                await response.write(b"".join(row(token, part.text) for token in part.token_ids))
        await response.write_eof()
        return response


class Core:
    """Rows of what the engine core sends; only its two messages are vLLM's."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._core: Any = llm.engine_core
        tokenizer: Any = llm.renderer.tokenizer
        self._encode = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json")).encode
        tables = tables_for(tokenizer)
        if tables is None:
            raise SystemExit("the tokenizer has no table")
        self._pieces: Any = tables[True]
        self._writers: dict[str, Callable[[Any], None]] = {}
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        writers = self._writers
        while True:
            outputs = await self._core.get_output_async()
            for output in outputs.outputs:
                writers[output.request_id](output)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer with a row for each token."""
        body = orjson.loads(await request.read())
        number = uuid.uuid4().hex
        response = web.StreamResponse(headers=ROWS)
        ended = asyncio.get_running_loop().create_future()
        pieces = self._pieces

        def write(output: Any) -> None:
            rows = b"".join(
                row(token, text if type(text := pieces[token]) is str else "")
                for token in output.new_token_ids
            )
            writer.send_chunk(rows)
            if output.finish_reason is not None:
                ended.set_result(None)

        params = parameters(body)
        ids = self._encode(body["inputs"]).ids
        await response.prepare(request)
        writer = Chunks(request)
        self._writers[number] = write
        await self._core.add_request_async(
            EngineCoreRequest(number, ids, None, params, None, time.time(), None, None, None, None)
        )
        try:
            await ended
        finally:
            del self._writers[number]
        await response.write_eof()
        return response


class Chunks:
    """Writes chunks of a response to the connection, without a task."""

    def __init__(self, request: web.Request) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionError
        self._write = transport.write

    def send_chunk(self, data: bytes) -> None:
        """Write one chunk."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))


async def main(way: str, port: int) -> None:
    """Serve."""
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments()))
    application = web.Application()
    if way == "core":
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        answer = Core(llm).answer
    else:
        answer = Generate(llm).answer
    application.router.add_post("/invocations", answer)

    async def ping(_: web.Request) -> web.Response:
        return web.Response()

    application.router.add_get("/ping", ping)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
