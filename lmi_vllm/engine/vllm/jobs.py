"""Jobs in vLLM: our messages become its prompts and parameters, and its errors ours."""

import asyncio
import copy
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.engine.vllm.async_llm import GuardedAsyncLLM
from lmi_vllm.engine.vllm.chunks import ChunkMaker
from lmi_vllm.engine.vllm.names import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    our_errors,
    parse_model_prompt,
    to_lora_request,
)
from lmi_vllm.engine.vllm.openai import VllmOpenAI
from lmi_vllm.engine.vllm.workarounds.text_lengths import render_text
from lmi_vllm.errors import (
    EngineFailureError,
    PayloadError,
)
from lmi_vllm.messages import GenerationChunk, GenerationJob, PromptToken

# Generation-config fields that decide how to sample; the others always apply, as in vLLM.
_SAMPLING_STYLE: Final = frozenset({"temperature", "top_k", "top_p", "min_p"})
_MODEL_DEFAULTS: Final = frozenset(
    {*_SAMPLING_STYLE, "repetition_penalty", "presence_penalty", "frequency_penalty"}
)

MOST_KEPT: Final = 256


class JobRunner:
    """Runs the jobs of one engine."""

    def __init__(self, llm: GuardedAsyncLLM, openai: VllmOpenAI) -> None:
        self._llm = llm
        self._openai = openai
        self._tokenizer: Any = llm.renderer.tokenizer
        self._whole_prompts = replace(
            llm.renderer.default_cmpl_tok_params, truncate_prompt_tokens=None, truncation_side=None
        )
        self._special_ids = frozenset(self._tokenizer.all_special_ids if self._tokenizer else ())
        self._end_ids = end_tokens(llm.input_processor.generation_config_fields, self._tokenizer)
        self._params: dict[tuple[object, ...], Any] = {}  # vLLM's, by `sampling_key`
        self._model_defaults: Mapping[str, Any] = {
            name: value
            for name, value in llm.model_config.get_diff_sampling_param().items()
            if name in _MODEL_DEFAULTS
        }

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of `job`; see `Engine.generate`."""
        chunks = ChunkMaker(job, self._tokenizer, self._special_ids, self._end_ids)
        with our_errors():
            outputs = self._outputs(job, await self._render(job))
            try:
                with self._llm.output_processor.in_lane(job, chunks, direct):
                    output = await anext(outputs, None)
                while output is not None:
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            raise EngineFailureError(
                                str(completion.stop_reason or "Internal server error")
                            )
                        yield chunks.make(output, completion)
                    output = await anext(outputs, None)
            finally:
                await outputs.aclose()

    def _outputs(self, job: GenerationJob, prompt: Any) -> AsyncGenerator[Any, None]:
        lora_request = job.adapter and to_lora_request(job.adapter)
        if job.beams is None:
            outputs: AsyncGenerator[Any, None] = self._llm.generate(
                prompt,
                self._sampling_params(job),
                job.request_id,
                lora_request=lora_request,
                priority=job.priority,
            )
            return outputs
        room = int(self._llm.model_config.max_model_len) - len(prompt["prompt_token_ids"])
        if room < 1:  # a step of a beam search is not checked for this
            raise PayloadError(
                "the prompt fills the model's context length of "
                f"{self._llm.model_config.max_model_len} tokens"
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
        params, text = self._whole_prompts, job.prompt
        if job.truncate_prompt_tokens:
            # Without a side the tokenizer cuts: at the left, and its special tokens are kept.
            params = replace(params, truncate_prompt_tokens=job.truncate_prompt_tokens)
            # vLLM bounds no text that is cut.
            if params.max_input_tokens and self._tokenizer:
                text = text[-params.max_input_tokens * self._tokenizer.max_chars_per_token :]
        without_text = list(job.prompt_ids) if self._tokenizer is None else None
        parsed = parse_model_prompt(self._llm.model_config, without_text or text)
        return await render_text(self._llm.renderer, parsed, params)

    def _sampling_params(self, job: GenerationJob) -> Any:
        """Return vLLM's parameters, which it copies: jobs with the same ones share them."""
        key = job.sampling_key
        if key is None or (params := self._params.get(key)) is None:
            params = self._new_params(job)
            if key is not None:
                if len(self._params) >= MOST_KEPT:
                    self._params.clear()
                self._params[key] = params
        return params

    def _new_params(self, job: GenerationJob) -> Any:
        values = dict(self._model_defaults)
        if not job.apply_model_defaults:
            for name in _SAMPLING_STYLE & values.keys():
                del values[name]
        values |= job.sampling
        constraint = values.get("structured_outputs")
        if isinstance(constraint, Mapping):
            values["structured_outputs"] = _constraint(constraint)
        values["output_kind"] = (
            RequestOutputKind.DELTA if job.is_streaming else RequestOutputKind.FINAL_ONLY
        )
        # What vLLM adds to its shallow copy, the model's end tokens, is the same for all jobs.
        values["skip_clone"] = True
        return SamplingParams(**values)


def _constraint(given: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return the constraint of a request.

    Raises:
        PayloadError: one of its fields is of another kind; each is named.
    """
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:
        details = getattr(error, "errors", None)  # of pydantic's; one of vLLM's names its fields
        if details is None:
            raise
        # A field that may be of several kinds has an error for each.
        problems = [f"{item['loc'][0]}: {item['msg']}" for item in details()]
        text = "; ".join(f"parameters.structured_outputs.{one}" for one in problems)
        raise PayloadError(text) from error
    except TypeError as error:  # a name that is none of its fields
        raise PayloadError(f"parameters.structured_outputs: {error}") from error


def end_tokens(generation: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a model's answers: the tokenizer's, and the generation config's.

    vLLM gives the latter to its engine as stop tokens, and so as the reason of an end.
    """
    found = generation.get("eos_token_id")
    ends = {found} if isinstance(found, int) else {*(found or ())}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return frozenset(ends)


class PromptTokenizer:
    """Tokenizes in a thread of its own with a copy, because tokenizers are not thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = asyncio.Lock()

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`; see `Engine.tokenize`."""
        async with self._lock:
            encoding = await asyncio.to_thread(
                self._copy, text, add_special_tokens=add_special_tokens,
                **({"return_offsets_mapping": True} if self._has_offsets else {}),
            )  # fmt: skip
        ids = encoding["input_ids"]
        spans = encoding.get("offset_mapping") or [(0, 0)] * len(ids)  # as TGI without offsets
        return [PromptToken(token, *span) for token, span in zip(ids, spans, strict=True)]

    @property
    def _has_offsets(self) -> bool:
        """Whether a call may ask for them: Mistral's own tokenizers say that they are fast."""
        return bool(self._tokenizer.is_fast) and hasattr(self._tokenizer, "backend_tokenizer")

    @functools.cached_property
    def _copy(self) -> Any:
        return copy.deepcopy(self._tokenizer)
