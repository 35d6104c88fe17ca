"""vLLM's OpenAI handlers behind `answer`: its request models, its bytes, its error bodies.

A vLLM upgrade changes this file most, because vLLM's request models and handlers move often.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from pydantic import TypeAdapter
from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from lmi_vllm.engine.base import DirectEvents
from lmi_vllm.engine.vllm.asgi import raw_headers
from lmi_vllm.engine.vllm.bridge import Bridge, shown_body
from lmi_vllm.engine.vllm.names import LoRARequest, VllmEngineDeadError, create_error_response
from lmi_vllm.engine.vllm.outputs import DirectTexts, EngineOutputs
from lmi_vllm.errors import EngineDeadError, EngineFailureError, RequestError
from lmi_vllm.messages import HttpCall, OpenAICall, OpenAIReply

logger = logging.getLogger(__name__)

# vLLM's handler of chats asserts that it has one, and answers 500.
_NO_TOKENIZER: Final = (
    "messages: the server has no tokenizer (option.skip_tokenizer_init, option.tokens_only): it "
    "takes tokens, as /inference/v1/generate and the prompt of /v1/completions"
)
_SAGEMAKER_S: Final = "x-amzn-sagemaker-"
# As in `starlette.responses.JSONResponse.render`.
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class _Handler:
    """vLLM's handler of one kind of call: its place, and the request model that it reads."""

    attribute: str  # of vLLM's application state
    method: str
    reader: "TypeAdapter[Any]"


# Kinds whose streams may be read where their text is made; others use the bridge.
_HANDLERS: Final[Mapping[str, _Handler]] = MappingProxyType(
    {
        "chat/completions": _Handler(
            "openai_serving_chat", "create_chat_completion", TypeAdapter(ChatCompletionRequest)
        ),
        "completions": _Handler(
            "openai_serving_completion", "create_completion", TypeAdapter(CompletionRequest)
        ),
    }
)


class VllmOpenAI:
    """Answers calls by kind: two kinds by vLLM's handlers, the others by its HTTP application."""

    def __init__(self, bridge: Bridge, outputs: EngineOutputs) -> None:
        self._bridge = bridge
        self._outputs = outputs
        self._app = bridge.app

    def beam_search(
        self, prompt: Any, request_id: str, params: Any, lora_request: LoRARequest | None
    ) -> AsyncGenerator[Any, None]:
        """Return the only output of vLLM's beam search, which its completion handler runs."""
        serving = self._app.state.openai_serving_completion
        outputs: AsyncGenerator[Any, None] = serving.beam_search(
            prompt, request_id, params, lora_request=lora_request
        )
        return outputs

    def answer(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> Coroutine[Any, Any, OpenAIReply]:
        """Answer `call` with vLLM's bytes; faults of the request are replies.

        Raises:
            EngineDeadError: the engine is gone.
        """
        if call.kind == "models":
            return self._models()
        handler = _HANDLERS.get(call.kind)
        serving = None if handler is None else getattr(self._app.state, handler.attribute, None)
        if handler is None or serving is None:
            return self._forward(call)
        try:
            request = self._read(call, handler.reader)
        except Exception:  # noqa: BLE001 (vLLM's own, of many kinds: its application says why)
            return self._forward(call)
        return self._handle(call, getattr(serving, handler.method), request, direct)

    async def _models(self) -> OpenAIReply:
        served = self._app.state.openai_serving_models.registry  # without our keys
        models = await served.show_available_models()
        return _json_reply(models.model_dump())

    async def _handle(
        self, call: OpenAICall, handle: Any, request: Any, direct: DirectEvents | None
    ) -> OpenAIReply:
        if call.kind == "chat/completions" and self._outputs.tokenizer is None:
            return _error(create_error_response(ValueError(_NO_TOKENIZER)))
        raw_request = self._raw_request(call)
        try:
            texts = self._outputs.direct_texts(call, handle.__self__, direct)
            task = asyncio.current_task()
            before = task.cancelling() if task else 0
            found = await handle(request, raw_request)
            # vLLM takes every cancellation for the client's, and answers it: 400, "Client
            # disconnected". Who cancelled has to hear of it: the end of the server and time limits
            # have answers of their own.
            if task is not None and task.cancelling() > before:
                raise asyncio.CancelledError
            reply = _reply(found, texts)
            if reply.status >= HTTPStatus.BAD_REQUEST:  # an answer has the adapter's own name
                reply = self._bridge.with_own_name(reply, call.adapter)
            return reply
        except VllmEngineDeadError as error:
            raise EngineDeadError from error
        except Exception as error:
            reply = _error(create_error_response(error))
            if reply.status >= 500:  # noqa: PLR2004 (the server's fault: worth a trace)
                logger.exception("vLLM failed on %s", raw_request.url.path)
            return self._bridge.with_own_name(reply, call.adapter)

    async def _forward(self, call: OpenAICall) -> OpenAIReply:
        """Answer over the bridge; a path that the application lacks is 404."""
        paths = {"/invocations", *(route.path for route in self._bridge.routes)}
        path = f"/{call.kind}" if f"/{call.kind}" in paths else f"/v1/{call.kind}"
        body = json.dumps(dict(call.body)).encode()
        headers = {
            name: value
            for name, value in call.headers.items()
            if not name.lower().startswith(_SAGEMAKER_S)  # already read; vLLM would act on them
        }
        headers["content-type"] = "application/json"
        request_id = "" if "request_id" in call.body else call.request_id
        raw = raw_headers(headers)
        http = HttpCall("POST", path, "", raw, body, request_id, call.adapter)
        if path not in paths:  # vLLM's server then has no such path
            text = f"The model does not support {call.kind}"
            return _error(create_error_response(text, "NotFoundError", HTTPStatus.NOT_FOUND))
        return await self._bridge.call(http)

    def _read(self, call: OpenAICall, reader: "TypeAdapter[Any]") -> Any:
        """Return vLLM's typed request, or what its validators raise."""
        body = dict(call.body)
        if call.adapter is not None:
            body["model"] = self._bridge.key(call.adapter)
        return reader.validate_python(body)

    def _raw_request(self, call: OpenAICall) -> Request:
        headers = dict(call.headers)
        if "request_id" not in call.body:
            headers["x-request-id"] = call.request_id
        return Request(
            {
                "type": "http",
                "method": "POST",
                "path": f"/v1/{call.kind}",
                "headers": raw_headers(headers),
                "app": self._app,
            }
        )


def _error(found: ErrorResponse) -> OpenAIReply:
    reply = _json_reply(found.model_dump(), found.error.code)
    return replace(reply, body=shown_body(reply.body))


def _reply(result: Any, texts: DirectTexts | None) -> OpenAIReply:
    """Return the reply that vLLM's own route would send for the handler's result."""
    if isinstance(result, AsyncGenerator):
        return OpenAIReply(
            200,
            content_type="text/event-stream; charset=utf-8",
            stream=_encoded(result, texts),
        )
    if isinstance(result, ErrorResponse):
        return _error(result)
    return _json_reply(result.model_dump(), response=result)


def _json_reply(
    document: Mapping[str, Any], status: int = HTTPStatus.OK, response: object = None
) -> OpenAIReply:
    """Return the bytes of starlette's JSONResponse, which also makes headers that are not read."""
    return OpenAIReply(status, _encode(document).encode(), response=response)


async def _encoded(
    events: AsyncGenerator[Any, None], texts: DirectTexts | None
) -> AsyncIterator[bytes]:
    """Yield vLLM's SSE events as bytes; closing this closes vLLM's iterator, which aborts.

    Raises:
        EngineDeadError: the engine is gone.
        LmiError: the request failed, in vLLM's words.
    """
    try:
        with contextlib.nullcontext() if texts is None else texts.sequences():
            event = await anext(events, None)
        while event is not None:
            data = event.encode()
            if texts is not None:
                texts.learn(data)
            yield data
            event = await anext(events, None)
    except VllmEngineDeadError as error:
        raise EngineDeadError from error
    except Exception as error:
        reply = create_error_response(error).error
        if reply.code < 500:  # noqa: PLR2004 (the client's fault)
            raise RequestError(reply.message) from error
        logger.exception("vLLM failed in a stream")
        raise EngineFailureError(reply.message) from error
    finally:
        await events.aclose()
