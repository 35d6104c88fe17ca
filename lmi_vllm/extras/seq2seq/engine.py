"""Encoder-decoder models, which vLLM does not run, over Transformers behind the `Engine` protocol.

Good for models of this kind at moderate load: requests join a running batch and stream. It is
no vLLM: no paged cache, no kernels of its own, no LoRA, no grammars, one device.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final

from lmi_vllm.engine.base import DirectChunks, DirectEvents
from lmi_vllm.engine.vllm.routes import openai_schemas
from lmi_vllm.errors import (
    AdapterRefusedError,
    EngineDeadError,
    EngineStartError,
    LmiError,
    PayloadError,
)
from lmi_vllm.extras.seq2seq.model import LoadedModel, load_model, release
from lmi_vllm.extras.seq2seq.openai import OpenAIAnswers
from lmi_vllm.extras.seq2seq.sampling import Sampling, SamplingBounds, read_sampling
from lmi_vllm.extras.seq2seq.steps import Item, StepRequest, StepThread
from lmi_vllm.extras.seq2seq.text import TokenTexts
from lmi_vllm.messages import (
    AdapterRef,
    EngineArguments,
    GenerationChunk,
    GenerationJob,
    OpenAICall,
    OpenAIReply,
    OpenAISchemas,
    PromptToken,
    ServingProfile,
)
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS: Final = 5.0
DEFAULT_ROWS: Final = 256
# Fields of generation_config that decide how to sample; the penalty always applies, as on vLLM.
_STYLE: Final = ("temperature", "top_k", "top_p", "min_p")
_MODEL_DEFAULTS: Final = (*_STYLE, "repetition_penalty")


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
        raise EngineStartError(f"the engine did not start: {text}") from error
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

    def __init__(
        self, loaded: LoadedModel, arguments: EngineArguments, profile: ServingProfile
    ) -> None:
        values = arguments.values
        self._loaded = loaded
        self._tokenizer = loaded.tokenizer
        self._turn = asyncio.Lock()  # of the tokenizer, which is not made for two threads at once
        self._bounds = SamplingBounds(
            loaded.max_model_len, loaded.vocabulary, profile.limits.max_logprobs
        )
        self._defaults = _model_defaults(loaded)
        seed = values.get("seed")
        texts = TokenTexts(loaded.tokenizer)
        self._steps = StepThread(
            loaded,
            texts,
            arguments.number("max_num_seqs", DEFAULT_ROWS),
            seed if isinstance(seed, int) else None,
        )
        self._openai = OpenAIAnswers(self, profile, self._defaults, texts)

    @property
    def max_model_len(self) -> int:
        """Longest prompt, and longest answer, in tokens: they lie on two sides of the model."""
        return self._loaded.max_model_len

    @property
    def running_requests(self) -> int:
        """Requests that run or wait."""
        return self._steps.requests

    @property
    def progress(self) -> int:
        """Steps of the batch."""
        return self._steps.progress

    @property
    def openai_schemas(self) -> OpenAISchemas:
        """Those of vLLM's request and response models, which this engine reads and writes."""
        return openai_schemas()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; it is not safe to share with another thread."""
        return self._tokenizer

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
        sampling = self.sampling(job.sampling, has_style=job.apply_model_defaults)
        prompt = await self.encode(job.prompt, truncate=job.truncate_prompt_tokens)
        streaming = job.is_streaming
        async with contextlib.aclosing(self.run([prompt], sampling, streaming)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    def sampling(self, given: Mapping[str, Any], *, has_style: bool) -> Sampling:
        """Return the sampling that is asked for, over the model's own defaults.

        Raises:
            PayloadError: a field is out of range, or this engine does not have it.
        """
        own = {
            name: value for name, value in self._defaults.items() if has_style or name not in _STYLE
        }
        return read_sampling({**own, **given}, self._bounds)

    async def encode(
        self, text: str, *, truncate: int | None = None, side: str = "left", special: bool = True
    ) -> Sequence[int]:
        """Return the tokens of a prompt; with `truncate` that many, cut at that side.

        Raises:
            PayloadError: it is longer than the encoder takes, or has no token.
        """

        def tokens() -> list[int]:
            options: dict[str, Any] = {}
            if truncate is not None:
                self._tokenizer.truncation_side = side
                options = {"truncation": True, "max_length": truncate}
            encoding = self._tokenizer(text, add_special_tokens=special, verbose=False, **options)
            ids: list[int] = encoding["input_ids"]
            return ids

        return self.checked_prompt(await self.with_tokenizer(tokens))

    def checked_prompt(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a prompt where the encoder takes them.

        Raises:
            PayloadError: there are too many, none, or one that the model does not know.
        """
        if len(ids) > self.max_model_len:
            raise PayloadError(
                f"the prompt has {len(ids)} tokens, and the encoder takes at most "
                f"{self.max_model_len} (max_model_len)"
            )
        if not ids:
            raise PayloadError("the prompt has no token")
        if max(ids) >= self._bounds.vocabulary:
            raise PayloadError(f"the prompt has a token id above {self._bounds.vocabulary - 1}")
        return ids

    async def with_tokenizer(self, work: Callable[[], Any]) -> Any:
        """Do work with the tokenizer in a thread, alone."""
        async with self._turn:
            return await asyncio.to_thread(work)

    async def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, is_streaming: bool
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """Yield the chunks of all prompts as they come, each with its prompt's number.

        Raises:
            EngineDeadError: the engine is gone; also while iterating.
        """
        arrived: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        bad_words = await self.with_tokenizer(lambda: self._bad_words(sampling.bad_words))
        requests = [
            StepRequest(ids, sampling, bad_words, is_streaming, _numbered(arrived, number))
            for number, ids in enumerate(prompts)
        ]
        if (record := current_record()) is not None:
            record.work += requests
        left = sampling.n * len(requests)
        try:
            for request in requests:
                self._steps.submit(request)
            while left:
                number, item = await arrived.get()
                if isinstance(item, LmiError):
                    raise item
                left -= item.finish_reason is not None
                yield number, item
        finally:
            for request in requests:
                self._steps.abort(request)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`; see `Engine.tokenize`."""

        def encoded() -> Any:
            return self._tokenizer(
                text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
            )

        encoding = await self.with_tokenizer(encoded)
        pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        return [PromptToken(token, *span) for token, span in pairs]

    async def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> OpenAIReply:
        """Answer in the shape of vLLM's replies; see `Engine.answer_openai`."""
        del direct
        await self.check_health()
        return await self._openai.answer(call)

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Refuse it: there are none here."""
        await self.check_health()
        raise AdapterRefusedError(_no_adapters(adapter.name))

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """There is none to forget."""

    async def check_health(self) -> None:
        """Return when alive; raise EngineDeadError otherwise."""
        if self._steps.dead.is_set():
            raise EngineDeadError

    async def log_statistics(self) -> None:
        """Log nothing: it keeps no such figures."""

    async def wait_until_dead(self) -> None:
        """Return once a step has failed."""
        await self._steps.dead.wait()

    async def kill(self) -> bool:
        """Answer those who wait; the thread itself, and its memory, end only with this process."""
        self._steps.give_up()
        return False

    async def close(self) -> None:
        """End the thread; waits for its step at most `SHUTDOWN_SECONDS`."""
        if not await asyncio.to_thread(self._steps.stop, SHUTDOWN_SECONDS):
            logger.warning("a step of the Transformers engine did not end in time")
            return
        release(self._loaded.model)

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return each word's tokens, at the beginning of a text and inside one (as vLLM does)."""
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        encoded = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        known = self._bounds.vocabulary
        return [ids for ids in encoded if ids and max(ids) < known]


def _numbered(queue: "asyncio.Queue[tuple[int, Item]]", number: int) -> Callable[[Item], None]:
    return lambda item: queue.put_nowait((number, item))


def _no_adapters(name: str) -> str:
    return (
        f"adapter {name}: encoder-decoder models run on the Transformers engine, which has no "
        "LoRA adapters"
    )


def _model_defaults(loaded: LoadedModel) -> Mapping[str, Any]:
    """What the model's generation_config says of sampling, as far as it differs from the usual."""
    said = loaded.generation.to_diff_dict()
    return {name: said[name] for name in _MODEL_DEFAULTS if said.get(name) is not None}
