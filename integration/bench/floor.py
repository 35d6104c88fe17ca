"""The floor: vLLM's AsyncLLM consumed without HTTP, in a process of its own.

Answers lines on stdin, each with a number: `cost STREAMS TOKENS LOGPROBS` with the CPU microseconds
that this process spent per token, `first REQUESTS WORDS -1` with the median milliseconds to the
first token of requests one after another. Started by `integration.bench.floor_process`.
"""

import asyncio
import os
import statistics
import sys
import time
import uuid

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from integration.bench.first_token import TOKENS, prompts
from integration.bench.servers import PROMPT, engine_arguments


async def stream(llm: AsyncLLM, tokens: int, logprobs: int | None) -> int:
    """Consume one stream and return its tokens."""
    params = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        temperature=0.0,
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA,
    )
    seen = 0
    async for output in llm.generate(PROMPT, params, str(uuid.uuid4())):
        seen += len(output.outputs[0].token_ids)
    return seen


async def run(llm: AsyncLLM, streams: int, tokens: int, logprobs: int | None) -> float:
    """Return the CPU microseconds per token of so many streams at once."""
    began = time.process_time()
    counts = await asyncio.gather(*(stream(llm, tokens, logprobs) for _ in range(streams)))
    return (time.process_time() - began) / sum(counts) * 1e6


async def first_token(llm: AsyncLLM, requests: int, words: int) -> float:
    """Return the median milliseconds to the first token."""
    params = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.DELTA
    )
    found = []
    for prompt in prompts(requests, words):
        began, first = time.perf_counter(), 0.0
        async for _ in llm.generate(prompt, params, str(uuid.uuid4())):
            first = first or time.perf_counter() - began
        found.append(first * 1e3)
    return statistics.median(found)


async def main() -> None:
    """Serve requests for measurements until stdin ends."""
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments()))
    answers = os.fdopen(int(sys.argv[1]), "w")  # stdout is vLLM's
    print("ready", file=answers, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        kind, *words = line.split()
        first, second, third = (int(word) for word in words)
        if kind == "cost":
            found = await run(llm, first, second, third if third >= 0 else None)
        else:
            found = await first_token(llm, first, second)
        print(found, file=answers, flush=True)
    llm.shutdown()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
