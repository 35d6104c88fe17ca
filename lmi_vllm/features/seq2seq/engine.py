"""Encoder-decoder models, which vLLM does not run, over Transformers behind the `Engine` protocol.

Meant for moderate load: requests join a running batch and stream. It lacks what vLLM has: a paged
KV cache, kernels of its own, LoRA, grammars, and more than one device.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from lmi_vllm.engine.base import (
    ActiveAdapters,
    DirectChunks,
    DirectEvents,
    HttpApplication,
    start_error,
)
from lmi_vllm.engine.deaths import ENGINE_DIED
from lmi_vllm.errors import (
    AdapterRefusedError,
    EngineDeadError,
    EngineFailureError,
    LmiError,
    PayloadError,
)
from lmi_vllm.features.seq2seq.model import LoadedModel, load_model, release
from lmi_vllm.features.seq2seq.openai import OpenAIAnswers
from lmi_vllm.features.seq2seq.requests import openapi_document
from lmi_vllm.features.seq2seq.runner import SequenceRunner
from lmi_vllm.messages import (
    AdapterRef,
    EngineArguments,
    GenerationChunk,
    GenerationJob,
    OpenAICall,
    OpenAIReply,
    PromptToken,
    ServingProfile,
)

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS: Final = 5.0


async def start_transformers_engine(
    arguments: EngineArguments, profile: ServingProfile
) -> "TransformersEngine":
    """Load the model in a thread and return the running engine.

    Raises:
        EngineStartError: it cannot be loaded; the text says why.
    """
    try:
        loaded = await asyncio.to_thread(load_model, arguments)
    except LmiError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise start_error(f"the engine did not start: {text}") from error
    logger.info(
        "Transformers engine: %s on %s in %s, max_model_len %d",
        type(loaded.model).__name__,
        loaded.model.device,
        loaded.model.dtype,
        loaded.max_model_len,
    )
    return TransformersEngine(loaded, arguments, profile)


class TransformersEngine:
    """The engine of encoder-decoder models."""

    task = "generate"
    http: HttpApplication | None = None
    not_finite = (
        0  # not checked: no adapter, and no cache that outlives a request, could spread NaN
    )

    def __init__(
        self, loaded: LoadedModel, arguments: EngineArguments, profile: ServingProfile
    ) -> None:
        self.max_model_len = (
            loaded.max_model_len
        )  # of the prompt and of the answer, each: encoder and decoder
        self.tokenizer: object = loaded.tokenizer
        self.active_adapters = ActiveAdapters()
        self._loaded = loaded
        self._runner = SequenceRunner(loaded, arguments, profile)
        self._steps = self._runner.steps
        self._openai = OpenAIAnswers(self._runner, profile)

    @property
    def running_requests(self) -> int:
        """Number of requests that run or wait."""
        return self._steps.requests

    @property
    def progress(self) -> int:
        """Number of steps that the batch has run."""
        return self._steps.progress

    @property
    def openapi(self) -> Mapping[str, Any]:
        """An OpenAPI document of vLLM's request and response models that this engine uses."""
        return openapi_document()

    async def read_adapters(self) -> None:
        """Do nothing: there are no adapters."""

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of `job`; see `Engine.generate`. `direct` is never used."""
        del direct
        await self.check_health()
        if job.beams is not None:
            raise PayloadError(
                "num_beams: beam search is not available: encoder-decoder models run on the "
                "Transformers engine, where answers are greedy or sampled"
            )
        if job.adapter is not None:
            raise PayloadError(_no_adapters(job.adapter.name))
        runner, streaming = self._runner, job.is_streaming
        sampling = runner.sampling(job.sampling, uses_defaults=job.apply_model_defaults)
        prompt = await runner.encode(job.prompt, truncate=job.truncate_prompt_tokens)
        async with contextlib.aclosing(runner.run([prompt], sampling, streaming)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`; see `Engine.tokenize`."""
        return await self._runner.tokenize(text, add_special_tokens=add_special_tokens)

    async def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> OpenAIReply:
        """Answer in the shape of vLLM's replies; see `Engine.answer_openai`."""
        del direct
        await self.check_health()
        return await self._openai.answer(call)

    def uncounted(self) -> AbstractContextManager[None]:
        """There are no metrics of its own."""
        return contextlib.nullcontext()

    async def sleep(self, level: int) -> None:
        """Refuse: weights stay where they are while this engine runs.

        Raises:
            EngineFailureError: always.
        """
        raise EngineFailureError(
            f"the Transformers engine has no sleep level {level}: LMI_SLEEP_LEVEL=stop ends it"
        )

    async def wake_up(self, level: int) -> None:
        """Do nothing: it never sleeps."""

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Refuse the adapter: this engine has no LoRA.

        Raises:
            AdapterRefusedError: always.
            EngineDeadError: a step has failed.
        """
        await self.check_health()
        raise AdapterRefusedError(_no_adapters(adapter.name))

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Do nothing: no adapter is ever loaded."""

    async def check_health(self) -> None:
        """Return while the step thread lives.

        Raises:
            EngineDeadError: a step has failed.
        """
        if self._steps.dead.is_set():
            raise EngineDeadError

    async def log_statistics(self) -> None:
        """Do nothing: this engine keeps no statistics of its own."""

    async def wait_until_dead(self) -> str:
        """Return the failure of a step, once one has failed."""
        await self._steps.dead.wait()
        return self._steps.death or ENGINE_DIED

    async def kill(self) -> bool:
        """End all requests with an error; False: thread and memory stay until the process ends."""
        self._steps.declare_dead()
        return False

    async def close(self) -> None:
        """End the thread; waits for its step at most `SHUTDOWN_SECONDS`."""
        if not await asyncio.to_thread(self._steps.stop, SHUTDOWN_SECONDS):
            logger.warning("a step of the Transformers engine did not end in time")
            return
        release(self._loaded.model)


def _no_adapters(name: str) -> str:
    return (
        f"adapter {name}: encoder-decoder models run on the Transformers engine, which has no "
        "LoRA adapters"
    )
