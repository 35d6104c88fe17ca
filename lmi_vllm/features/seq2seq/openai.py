"""OpenAI calls on the Transformers engine: read by vLLM's request models, answered in its bytes.

vLLM's handlers need vLLM's engine, so this module has its own for completions, chat where
the tokenizer has a template, and the list of models. A field that this engine does not support is
refused by its name (400); fields that only concern tools or reasoning are accepted without effect.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson
from jinja2 import TemplateError

from lmi_vllm.errors import (
    DEFAULT_STATUSES,
    Dialect,
    PayloadError,
    RequestError,
    ResourceNotFoundError,
    openai_error,
)
from lmi_vllm.features.seq2seq.replies import ParsedRequest, ReplyRows, Usage, opening
from lmi_vllm.features.seq2seq.requests import (
    CHAT,
    COMPLETIONS,
    KINDS,
    answer_model,
    read_request,
    request_faults,
    sampling_fields,
)
from lmi_vllm.features.seq2seq.runner import SequenceRunner
from lmi_vllm.features.seq2seq.sampling import Sampling
from lmi_vllm.messages import GenerationChunk, OpenAICall, OpenAIReply, ServingProfile

DONE: Final = b"data: [DONE]\n\n"
NO_TEMPLATE: Final = (
    "this model's tokenizer has no chat template: set option.chat_template, or send `prompt`"
)

# What a template may raise for messages of another shape than it expects.
_TEMPLATE_ERRORS: Final = (
    TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip


class OpenAIAnswers:
    """Answers OpenAI calls over the engine."""

    def __init__(self, runner: SequenceRunner, profile: ServingProfile) -> None:
        self._runner = runner
        self._profile = profile
        self._defaults = dict(runner.defaults)
        self._rows = ReplyRows(runner.texts)
        self._started = int(time.time())

    async def answer(self, call: OpenAICall) -> OpenAIReply:
        """Return the reply to `call`; a fault of the request is a reply with its status.

        Raises:
            LmiError: the engine is gone, or failed.
        """
        try:
            if call.kind == "models":
                return _json(200, self._models())
            parsed = await self._read(call)
            if parsed.request.stream:
                chunks = self._runner.run(parsed.prompts, parsed.sampling, is_streaming=True)
                return OpenAIReply(
                    200, content_type="text/event-stream", stream=self._events(parsed, chunks)
                )
            return await self._full_reply(parsed)
        except (RequestError, ResourceNotFoundError) as error:
            status = DEFAULT_STATUSES.of(error, Dialect.OPENAI)
            return _json(status, openai_error(error, error.text, status))

    async def _read(self, call: OpenAICall) -> ParsedRequest:
        if call.kind not in KINDS:
            raise ResourceNotFoundError(f"The model does not support {call.kind}")
        with request_faults():
            request = read_request(call.kind, call.body)
            names = self._profile.served_names
            if request.model and request.model not in names:
                raise ResourceNotFoundError(f"The model `{request.model}` does not exist.")
            sampling = self._sampling(call.kind, request)
        prompts = await (
            self._prompts(request) if call.kind == COMPLETIONS else self._conversation(request)
        )
        is_chat = call.kind == CHAT
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{call.request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": names[0],
        }
        return ParsedRequest(call.kind, request, head, prompts, sampling)

    def _sampling(self, kind: str, request: Any) -> Sampling:
        """Return the sampling as vLLM's request model would pass it to vLLM."""
        given = sampling_fields(kind, request, self._runner.max_model_len, self._defaults)
        # The request model has filled in the model's defaults already.
        return self._runner.sampling(given, uses_defaults=False)

    async def _prompts(self, request: Any) -> list[Sequence[int]]:
        given = request.prompt
        if given is None or given == []:
            raise PayloadError("prompt: expected text, a list of texts, or token ids")
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [await self._prompt(request, one) for one in ([given] if is_one else given)]

    async def _prompt(self, request: Any, prompt: str | list[int]) -> Sequence[int]:
        truncate, side = self._truncation(request)
        if isinstance(prompt, str):
            special = bool(request.add_special_tokens)
            return await self._runner.encode(prompt, truncate=truncate, side=side, special=special)
        if truncate is not None:
            prompt = prompt[-truncate:] if side == "left" else prompt[:truncate]
        return self._runner.checked_prompt(prompt)

    async def _conversation(self, request: Any) -> list[Sequence[int]]:
        template = self._template()
        if template is None and not self._runner.tokenizer.chat_template:
            raise PayloadError(NO_TEMPLATE)
        messages = [_text_message(message) for message in request.messages]

        def render() -> str:
            text: str = self._runner.tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **(request.chat_template_kwargs or {}),
            )
            return text

        try:
            text = await self._runner.with_tokenizer(render)
        except _TEMPLATE_ERRORS as error:
            raise PayloadError(f"messages: the chat template refuses them: {error}") from error
        return [await self._prompt(request, text)]

    def _truncation(self, request: Any) -> tuple[int | None, str]:
        """Return how many tokens of a prompt are kept (None: all) and at which side it is cut."""
        wanted = request.truncate_prompt_tokens
        if wanted == -1:
            wanted = self._runner.max_model_len
        return wanted, request.truncation_side or "left"  # the side of generating models

    def _template(self) -> str | None:
        given = self._profile.chat_template
        if given is None or "{" in given:
            return given
        return Path(given).read_text("utf-8")

    async def _full_reply(self, parsed: ParsedRequest) -> OpenAIReply:
        found: dict[int, GenerationChunk] = {}
        run = self._runner.run(parsed.prompts, parsed.sampling, is_streaming=False)
        async with aclosing(run) as chunks:
            async for number, chunk in chunks:
                found[number * parsed.sampling.n + chunk.index] = chunk
        usage = Usage(sum(map(len, parsed.prompts)))
        choices = []
        for index, chunk in sorted(found.items()):
            usage.completion += len(chunk.tokens)
            choices.append(self._rows.choice(parsed, index, chunk))
        body = {**parsed.head, "choices": choices, "usage": usage.row()}
        if parsed.kind == CHAT and parsed.shows_ids:
            body["prompt_token_ids"] = list(parsed.prompts[0])
        response = answer_model(parsed.kind)
        answer = next(
            one for one in getattr(response, "__args__", (response,)) if "choices" in
            getattr(one, "model_fields", ())
        ).model_validate(body)  # fmt: skip
        return replace(_json(200, answer.model_dump()), response=answer)

    async def _events(
        self, parsed: ParsedRequest, chunks: AsyncGenerator[tuple[int, GenerationChunk], None]
    ) -> AsyncIterator[bytes]:
        """Yield vLLM's events; closing this iterator closes `chunks`, which aborts the request."""
        options = parsed.request.stream_options
        has_running_usage = bool(
            options and options.include_usage and options.continuous_usage_stats
        )
        total, each = Usage(sum(map(len, parsed.prompts))), dict[int, Usage]()
        offsets = dict[int, int]()
        is_chat = parsed.kind == CHAT
        head = {**parsed.head, "object": "chat.completion.chunk"} if is_chat else parsed.head
        for index in range(parsed.sampling.n if is_chat else 0):
            yield _event({**head, **opening(parsed, index), **(total.row_if(has_running_usage))})
        async with aclosing(chunks):
            async for number, chunk in chunks:
                index = number * parsed.sampling.n + chunk.index
                usage = each.setdefault(index, Usage(len(parsed.prompts[number])))
                row = self._rows.delta(parsed, index, chunk, offsets, is_first=not usage.completion)
                usage.completion += len(chunk.tokens)
                total.completion += len(chunk.tokens)
                yield _event({**head, "choices": [row], **usage.row_if(has_running_usage)})
        if options and options.include_usage:
            yield _event({**head, "choices": [], "usage": total.row()})
        yield DONE

    def _models(self) -> dict[str, Any]:
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": self._profile.model_name,
                "parent": None,
                "max_model_len": self._runner.max_model_len,
                "permission": [],
            }
            for name in self._profile.served_names
        ]
        return {"object": "list", "data": cards}


def _text_message(message: Any) -> dict[str, Any]:
    """Return a message with its content as one text.

    Raises:
        PayloadError: it has a part that is not text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    parts = list(content)
    if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in parts):
        raise PayloadError("messages: this model takes text only")
    return {**message, "content": "\n".join(str(part["text"]) for part in parts)}


def _event(row: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(row) + b"\n\n"


def _json(status: int, body: Mapping[str, Any]) -> OpenAIReply:
    return OpenAIReply(status, orjson.dumps(body))
