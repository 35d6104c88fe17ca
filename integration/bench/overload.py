"""Ten times the load that is admitted: how fast the excess is refused, and what it costs.

    python -m integration.bench overload

The engine is the real one on the embedded model, in a server that is started as users start it. The
load comes from this process. Refusals are timed from the request's first byte to the whole answer,
so this process' own work counts too. The pauses of its garbage collector do not: they were 75 ms.
"""

import argparse
import asyncio
import gc
import statistics
import time

import aiohttp
import psutil

from integration.bench.results import Claim, Result, Table
from integration.bench.servers import our_command, running

ADMITTED = 32
TIMES = 10
TOKENS = 300
REFUSAL_MILLISECONDS = 50.0  # target of issue 7
PERIOD_SECONDS = 1.0  # each refused client tries again


async def admitted(session: aiohttp.ClientSession) -> tuple[float, bytes]:
    """Return the seconds and the last row of one long stream."""
    parameters = {"max_new_tokens": TOKENS, "ignore_eos_token": True}
    body = {"inputs": "Once upon a time", "parameters": parameters, "stream": True}
    began = time.perf_counter()
    async with session.post("/invocations", json=body) as response:
        raw = await response.read()
    if response.status != 200:
        raise AssertionError(raw)
    return time.perf_counter() - began, raw.splitlines()[-1]


async def refused(session: aiohttp.ClientSession) -> float:
    """Return the milliseconds until one request too many was refused."""
    began = time.perf_counter()
    async with session.post("/invocations", json={"inputs": "a"}) as response:
        await response.read()
    if (response.status, "Retry-After" in response.headers) != (503, True):
        raise AssertionError(f"{response.status}: the queue was not full")
    return (time.perf_counter() - began) * 1000


async def run(url: str, pid: int) -> Result:
    """Measure without and with the excess."""
    process = psutil.Process(pid)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await asyncio.gather(*(admitted(session) for _ in range(ADMITTED)))  # warm up
        alone = await asyncio.gather(*(admitted(session) for _ in range(ADMITTED)))
        before = process.memory_info().rss
        streams = [asyncio.create_task(admitted(session)) for _ in range(ADMITTED)]
        await asyncio.sleep(0.3)  # all are in
        milliseconds: list[float] = []
        peak = before
        workers = ADMITTED * TIMES

        async def excess(position: int) -> None:
            nonlocal peak
            await asyncio.sleep(PERIOD_SECONDS * position / workers)  # evenly spread
            while not any(stream.done() for stream in streams):
                try:
                    milliseconds.append(await refused(session))
                except AssertionError:
                    return  # the first stream has ended meanwhile
                peak = max(peak, process.memory_info().rss)
                await asyncio.sleep(PERIOD_SECONDS)

        await asyncio.gather(*(excess(position) for position in range(workers)))
        loaded = await asyncio.gather(*streams)
        after = process.memory_info().rss
    if {row for _, row in alone} != {row for _, row in loaded}:
        raise AssertionError("an admitted request was touched")
    waits = [statistics.median(second for second, _ in found) for found in (alone, loaded)]
    return _result(sorted(milliseconds), waits, (before, peak, after))


def _result(ranked: list[float], waits: list[float], sizes: tuple[int, int, int]) -> Result:
    """Return what was found: milliseconds of refusals, seconds of streams, bytes of memory."""
    rows = [
        ["refusals", str(len(ranked))],
        ["refused after ms, p50", f"{statistics.median(ranked):.1f}"],
        ["refused after ms, p99", f"{ranked[int(len(ranked) * 0.99)]:.1f}"],
        ["seconds of an admitted stream, alone", f"{waits[0]:.2f}"],
        ["seconds of an admitted stream, beside them (same bytes)", f"{waits[1]:.2f}"],
        *(
            [f"resident MiB, {when}", f"{size / 2**20:.0f}"]
            for when, size in zip(("before", "at most", "after"), sizes, strict=True)
        ),
    ]
    title = (
        f"{ADMITTED} admitted streams of {TOKENS} tokens and {ADMITTED * TIMES} clients too many"
    )
    claim = Claim("ms until a refusal, p99", ranked[int(len(ranked) * 0.99)], REFUSAL_MILLISECONDS)
    return Result([Table(title, ["", "found"], rows)], [claim])


def main() -> Result:
    """Start a server and measure."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    environ = {"SERVING_JOB_QUEUE_SIZE": str(ADMITTED)}
    with running(our_command, "/ping", environ) as server:
        gc.collect()
        gc.freeze()
        return asyncio.run(run(server.url, server.process.pid))
