"""`AsyncLLM` behind the `Engine` protocol; vLLM's errors become ours here."""

import asyncio
import contextlib
import copy
import functools
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final, TypeVar

from vllm import envs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from lmi_vllm.engine.base import NO_OTHERS, DirectChunks, DirectEvents, OtherClients
from lmi_vllm.engine.vllm.chunks import ChunkMaker
from lmi_vllm.engine.vllm.grammars import GrammarGuard
from lmi_vllm.engine.vllm.isolation import IsolatingAsyncLLM
from lmi_vllm.engine.vllm.media import guard_media
from lmi_vllm.engine.vllm.openai import VllmOpenAI
from lmi_vllm.engine.vllm.output import DirectRequest, ReadDirectly
from lmi_vllm.engine.vllm.routes import openai_schemas
from lmi_vllm.engine.vllm.start import StartedEngine, check_arguments, start_vllm
from lmi_vllm.errors import (
    EngineDeadError,
    EngineFailureError,
    EngineStartError,
    LmiError,
    OverloadError,
    PayloadError,
)
from lmi_vllm.messages import (
    AdapterRef,
    EngineArguments,
    EngineSeat,
    GenerationChunk,
    GenerationJob,
    OpenAICall,
    OpenAIReply,
    OpenAISchemas,
    PromptToken,
    ServingProfile,
    SharedAdapter,
)

__all__ = [
    "VllmEngine",
    "check_arguments",
    "start_vllm_engine",
]

logger = logging.getLogger(__name__)

DEATH_POLL_SECONDS: Final = 0.2
SHUTDOWN_SECONDS: Final = 5.0
LAST_ANSWER_SECONDS: Final = 2.0
# Generation-config fields that decide how to sample; the others always apply, as in vLLM.
_SAMPLING_STYLE: Final = frozenset({"temperature", "top_k", "top_p", "min_p"})
_MODEL_DEFAULTS: Final = frozenset(
    {*_SAMPLING_STYLE, "repetition_penalty", "presence_penalty", "frequency_penalty"}
)


AnyEngine = TypeVar("AnyEngine", bound="VllmEngine")


async def start_vllm_engine(
    arguments: EngineArguments,
    profile: ServingProfile,
    thread: ThreadPoolExecutor,
    seats: tuple[EngineSeat, ...] = (),
) -> "VllmEngine":
    """Start vLLM and everything request handling needs of it.

    `thread` must outlive the engine: its one thread is the parent of the engine's processes. Other
    processes may take `seats` at it.

    Raises:
        ConfigurationError: the installed vLLM refuses an argument.
        EngineStartError: the engine did not come up.
    """
    started = await start_vllm(arguments, thread, seats)

    async def isolate() -> None:
        await started.llm.isolate(is_cpu=started.is_cpu)

    return await make_engine(VllmEngine, started, profile, isolate)


async def make_engine(
    kind: type[AnyEngine],
    started: StartedEngine,
    profile: ServingProfile,
    guard: Callable[[], Awaitable[None]],
) -> AnyEngine:
    """Return the engine over what was started, once `guard` has prepared it; else nothing stays."""
    try:
        await guard()
        if profile.limits.grammar_timeout:
            seconds = profile.limits.grammar_timeout
            started.llm.guard_grammars(GrammarGuard(started.llm, seconds, started.thread))
        guard_media(profile.media)
        openai = await VllmOpenAI.create(started.llm, started.namespace, profile)
        envs.enable_envs_cache()  # vLLM asks for one of its variables for each token
        return kind(started, openai, await _task(started.llm))
    except BaseException as error:
        started.llm.clean_up()
        started.llm.shutdown()
        if isinstance(error, Exception) and not isinstance(error, LmiError):
            raise EngineStartError(f"the engine did not start: {error}") from error
        raise


class VllmEngine:
    """The real engine."""

    def __init__(self, started: StartedEngine, openai: VllmOpenAI, task: str) -> None:
        self._llm = started.llm
        self._thread = started.thread  # kept alive: the kernel ends the engine with this thread
        self._openai = openai
        self._task = task
        self._is_closing = False
        self._arguments = started.arguments
        self.others: OtherClients = NO_OTHERS
        self._tokenizer: Any = started.llm.renderer.tokenizer
        self._tokenize_turn = asyncio.Lock()
        self._special_ids = frozenset(self._tokenizer.all_special_ids if self._tokenizer else ())
        self._model_defaults: Mapping[str, Any] = {
            name: value
            for name, value in started.llm.model_config.get_diff_sampling_param().items()
            if name in _MODEL_DEFAULTS
        }

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return int(self._llm.model_config.max_model_len)

    @property
    def task(self) -> str:
        """What vLLM made of the model; see `Engine.task`."""
        return self._task

    @property
    def openai_schemas(self) -> OpenAISchemas:
        """The schemas of vLLM's own request and response models."""
        return openai_schemas()

    @functools.cached_property
    def _own_tokenizer(self) -> Any:
        """A copy of the tokenizer for a thread of its own."""
        return copy.deepcopy(self._tokenizer)

    @property
    def running_requests(self) -> int:
        """Requests the engine has not finished."""
        return int(self._llm.get_num_unfinished_requests()) + self.others.running_requests

    @property
    def tokenizer(self) -> object:
        """The tokenizer that vLLM uses; it is not safe to share with another thread."""
        return self._tokenizer

    @property
    def progress(self) -> int:
        """Steps of the engine whose outputs have arrived."""
        return self._llm.output_processor.steps + self.others.steps

    @property
    def arguments(self) -> EngineArguments:
        """What the engine was started with, what was added for this machine included."""
        return self._arguments

    @property
    def shared_adapters(self) -> tuple[SharedAdapter, ...]:
        """The adapters in the engine, for its other clients."""
        return self._llm.shared_adapters

    def hold_for_another(self, engine_id: int) -> AbstractAsyncContextManager[None]:
        """Keep an adapter usable for a request of another client while the body runs."""
        return self._llm.hold_for_another(engine_id)

    async def abort_for_another(self, engine_requests: Collection[str]) -> None:
        """End requests of another client; ids that the engine does not know are ignored."""
        if not self._llm.errored:
            await self._llm.engine_core.abort_requests_async(list(engine_requests))

    def complete(self, seat: EngineSeat) -> EngineSeat:
        """Return the seat with what is only known of a running engine."""
        stats: str | None = self._llm.engine_core.stats_update_address
        return replace(seat, stats_address=stats, base_adapter=self._llm.base_adapter)

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of `job`; see `Engine.generate`."""
        chunks = ChunkMaker(job, self._tokenizer, self._special_ids)
        with _our_errors():
            outputs = self._outputs(job, await self._render(job))
        try:
            with _our_errors():
                with ReadDirectly(_direct_request(job, chunks, direct)):
                    output = await anext(outputs, None)
                while output is not None:
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            raise EngineFailureError("Internal server error")
                        yield chunks.make(output, completion)
                    output = await anext(outputs, None)
        finally:
            await outputs.aclose()

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`; see `Engine.tokenize`."""
        async with self._tokenize_turn:  # a tokenizer is not made for two threads at once
            encoding = await asyncio.to_thread(
                self._own_tokenizer, text, add_special_tokens=add_special_tokens,
                return_offsets_mapping=self._tokenizer.is_fast,
            )  # fmt: skip
        ids = encoding["input_ids"]
        spans = encoding.get("offset_mapping") or [(0, 0)] * len(ids)  # as TGI without offsets
        return [PromptToken(token, *span) for token, span in zip(ids, spans, strict=True)]

    async def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> OpenAIReply:
        """Answer with vLLM's own handlers; see `Engine.answer_openai`."""
        if self._llm.errored:
            raise EngineDeadError
        reply: OpenAIReply = await self._openai.answer(call, direct)
        return reply

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Load a private copy of the adapter and let OpenAI calls find it by name."""
        with _our_errors():
            await self._while_alive(self._llm.load(adapter))
        self._openai.add_adapter(adapter)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget the adapter's name, then its weights."""
        self._openai.remove_adapter(adapter)
        with _our_errors():
            await self._while_alive(self._llm.unload(adapter))

    async def check_health(self) -> None:
        """Return when alive; raise EngineDeadError otherwise."""
        if self._llm.errored:
            raise EngineDeadError

    async def wait_until_dead(self) -> None:
        """Return once the engine process is gone without `close`."""
        while self._is_closing or not self._llm.errored:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(DEATH_POLL_SECONDS)

    async def close(self) -> None:
        """End the engine's processes; waits for them at most `SHUTDOWN_SECONDS` each."""
        if self._is_closing:
            return
        self._is_closing = True
        envs.disable_envs_cache()  # the next model may bring another environment
        handler = self._llm.output_handler
        if handler is not None:
            if self._llm.errored:  # it still has to tell every request
                await asyncio.wait([handler], timeout=LAST_ANSWER_SECONDS)
            handler.cancel()  # else it reports the end we asked for as an engine death
            await asyncio.wait([handler])
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_SECONDS)
        self._llm.release()
        self._llm.clean_up()
        self._thread.shutdown(wait=False)

    async def _while_alive(self, call: Coroutine[Any, Any, None]) -> None:
        """Carry out a call of the engine; vLLM leaves calls unanswered whose engine dies."""
        task = asyncio.create_task(call)
        try:
            while not task.done():
                if self._llm.errored or self._is_closing:
                    raise EngineDeadError
                await asyncio.wait([task], timeout=DEATH_POLL_SECONDS)
        except BaseException:
            task.cancel()
            raise
        await task

    def _outputs(self, job: GenerationJob, prompt: Any) -> AsyncGenerator[Any, None]:
        lora_request = self._lora_request(job.adapter)
        if job.beams is None:
            outputs: AsyncGenerator[Any, None] = self._llm.generate(
                prompt,
                self._sampling_params(job),
                job.request_id,
                lora_request=lora_request,
                priority=job.priority,
            )
            return outputs
        room = self.max_model_len - len(prompt["prompt_token_ids"])
        if room < 1:  # a step of a beam search has no such check
            raise PayloadError(
                f"the prompt fills the model's context length of {self.max_model_len} tokens"
            )
        wanted = job.number("max_tokens", 0)
        params = BeamSearchParams(
            beam_width=job.beams.width,
            max_tokens=min(wanted, room) if wanted else room,
            length_penalty=job.beams.length_penalty,
            ignore_eos=bool(job.sampling.get("ignore_eos", False)),
            include_stop_str_in_output=True,  # keeps the end token among the tokens
            skip_special_tokens=job.sampling.get("skip_special_tokens") is not False,
        )
        return self._openai.beam_search(prompt, job.request_id, params, lora_request)

    async def _render(self, job: GenerationJob) -> Any:
        renderer = self._llm.renderer
        params = replace(
            renderer.default_cmpl_tok_params,
            truncate_prompt_tokens=job.truncate_prompt_tokens,
            truncation_side="left" if job.truncate_prompt_tokens else None,
        )
        parsed = parse_model_prompt(self._llm.model_config, job.prompt)
        (rendered,) = await renderer.render_cmpl_async([parsed], params)
        return rendered

    def _lora_request(self, adapter: AdapterRef | None) -> Any:
        if adapter is None:
            return None
        return LoRARequest(adapter.name, adapter.engine_id, adapter.path)

    def _sampling_params(self, job: GenerationJob) -> Any:
        values: dict[str, Any] = {
            name: value
            for name, value in self._model_defaults.items()
            if job.apply_model_defaults or name not in _SAMPLING_STYLE
        }
        values |= dict(job.sampling)
        constraint = values.get("structured_outputs")
        if isinstance(constraint, Mapping):
            values["structured_outputs"] = StructuredOutputsParams(**constraint)
        values["output_kind"] = (
            RequestOutputKind.DELTA if job.is_streaming else RequestOutputKind.FINAL_ONLY
        )
        values["skip_clone"] = True  # made for this job alone; vLLM says so of OpenAI's, too
        return SamplingParams(**values)


async def _task(llm: IsolatingAsyncLLM) -> str:
    tasks = await llm.get_supported_tasks()
    if "generate" in tasks:
        return "generate"
    return str(llm.model_config.get_pooling_task(tasks))


def _direct_request(
    job: GenerationJob, chunks: ChunkMaker, direct: DirectChunks | None
) -> DirectRequest | None:
    """Return how vLLM's output loop may shorten the way of the job's tokens."""
    if job.beams is not None:  # a beam search adds sequences of its own
        return None
    is_sampled_only = job.sampling.get("logprobs") == 0
    return DirectRequest(chunks, direct if job.is_streaming else None, is_sampled_only)


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    """Turn vLLM's exceptions into ours, cause kept."""
    try:
        yield
    except VllmEngineDeadError as error:
        raise EngineDeadError from error
    except VLLMClientError as error:
        raise PayloadError(str(error)) from error
    except GracefulHTTPError as error:
        raise OverloadError("lmi") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise PayloadError(str(error)) from error
    except (LmiError, asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:
        raise EngineFailureError(f"the engine failed: {error}") from error
