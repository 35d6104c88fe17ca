"""vLLM's OpenAI handlers behind `answer`: its request models, its bytes, its error bodies.

The file that a vLLM upgrade changes most: its request models and handlers have moved often.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    validation_exception_handler,
)
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from lmi_vllm.engine.base import DirectEvents
from lmi_vllm.engine.vllm.bridge import Bridge
from lmi_vllm.engine.vllm.events import TextEvents, may_be_direct
from lmi_vllm.engine.vllm.output import DirectRequest, ReadDirectly
from lmi_vllm.engine.vllm.routes import ROUTES, STORED_ROUTES, HandlerRoute, request_adapter
from lmi_vllm.errors import EngineDeadError, EngineFailureError, RequestError
from lmi_vllm.messages import OpenAICall, OpenAIReply

logger = logging.getLogger(__name__)

# vLLM's words, as assertions of its own, where a prompt has no place for a picture.
_NO_PLACE_MARKS: Final = ("Failed to apply prompt replacement for", "Expected there to be ")


class VllmOpenAI:
    """vLLM's handlers over one engine: those of its HTTP application."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._app = bridge.app
        self._readers = {kind: request_adapter(kind) for kind in ROUTES}

    def beam_search(
        self, prompt: Any, request_id: str, params: Any, lora_request: LoRARequest | None
    ) -> AsyncGenerator[Any, None]:
        """Return the one output of vLLM's beam search, which its completion handler has."""
        serving = self._app.state.openai_serving_completion
        outputs: AsyncGenerator[Any, None] = serving.beam_search(
            prompt, request_id, params, lora_request=lora_request
        )
        return outputs

    async def answer(self, call: OpenAICall, direct: DirectEvents | None = None) -> OpenAIReply:
        """Answer `call` with vLLM's bytes; faults of the request are replies.

        Raises:
            EngineDeadError: the engine is gone.
        """
        raw_request = self._raw_request(call)
        try:
            if call.kind == "models":
                served = self._app.state.openai_serving_models.registry  # without our keys
                models = await served.show_available_models()
                return _json_reply(JSONResponse(models.model_dump()))
            if call.kind in STORED_ROUTES:
                return _reply(await self._about_stored(call), ROUTES["responses"])
            events = self._text_events(call, direct)
            return _reply(await self._handle(call, raw_request), ROUTES[call.kind], events)
        except VllmEngineDeadError as error:
            raise EngineDeadError from error
        except Exception as error:
            reply = create_error_response(_explained(error))
            if reply.error.code >= 500:  # noqa: PLR2004 (the server's fault: worth a trace)
                logger.exception("vLLM failed on %s", raw_request.url.path)
            return _json_reply(JSONResponse(reply.model_dump(), reply.error.code))

    def _text_events(self, call: OpenAICall, direct: DirectEvents | None) -> TextEvents | None:
        handler = getattr(self._app.state, ROUTES[call.kind].attribute, None)
        if direct is None or handler is None or not may_be_direct(call.kind, call.body, handler):
            return None
        return TextEvents(direct)

    async def _handle(self, call: OpenAICall, raw_request: Request) -> Any:
        route = ROUTES[call.kind]
        handler = getattr(self._app.state, route.attribute, None)
        if handler is None:
            return _unsupported(route)
        body = dict(call.body)
        if call.adapter is not None:
            body["model"] = self._bridge.key(call.adapter)
        try:
            request = self._readers[call.kind].validate_python(body)
        except ValidationError as error:
            return await _validation_response(raw_request, error, call.body)
        except (AttributeError, LookupError, RecursionError) as error:
            # vLLM's validators take some shapes for granted: still the client's fault.
            raise ValueError(f"the request cannot be read: {error}") from error
        return await getattr(handler, route.method)(request, raw_request)

    async def _about_stored(self, call: OpenAICall) -> Any:
        """Answer about an earlier response; vLLM keeps them only where its environment says so."""
        handler = getattr(self._app.state, ROUTES["responses"].attribute, None)
        if handler is None:
            return _unsupported(ROUTES["responses"])
        return await getattr(handler, STORED_ROUTES[call.kind])(**call.body)

    def _raw_request(self, call: OpenAICall) -> Request:
        headers = {name.lower(): value for name, value in call.headers.items()}
        headers["x-request-id"] = call.request_id
        return Request(
            {
                "type": "http",
                "method": "POST",
                "path": f"/v1/{call.kind}",
                "headers": [
                    (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
                    for name, value in headers.items()
                ],
                "app": self._app,
            }
        )


def _explained(error: Exception) -> Exception:
    """Return a fault of the request where vLLM takes one for its own and does not say what it is.

    A chat template without a place for what a message shows is one: the model's, or the user's own.
    """
    text = str(error)
    if isinstance(error, (AssertionError, RuntimeError)) and text.startswith(_NO_PLACE_MARKS):
        return ValueError(
            "the model's chat template has no place for this picture, video or sound: give one "
            "that has (option.chat_template), or a checkpoint with the files of its processor. "
            f"vLLM: {text}"
        )
    return error


def _unsupported(route: HandlerRoute) -> ErrorResponse:
    """Say that the model has no such interface; vLLM's server has no such path then: 404."""
    return ErrorResponse(
        error=ErrorInfo(
            message=f"The model does not support {route.interface}",
            type="NotFoundError",
            code=HTTPStatus.NOT_FOUND.value,
        )
    )


def _reply(result: Any, route: HandlerRoute, texts: TextEvents | None = None) -> OpenAIReply:
    """Return what vLLM's own route would send for what its handler gave."""
    if isinstance(result, StreamingResponse):
        return OpenAIReply(
            result.status_code,
            content_type=result.media_type or "application/octet-stream",
            stream=_chunks(result.body_iterator),
            headers=_extra_headers(result),
        )
    if isinstance(result, Response):  # the pooling handlers build their own
        return _json_reply(result)
    if isinstance(result, AsyncGenerator):
        return OpenAIReply(200, content_type="text/event-stream", stream=_encoded(result, texts))
    status = result.error.code if isinstance(result, ErrorResponse) else 200
    by_alias = {"mode": "json", "by_alias": True} if route.is_by_alias else {}
    reply = _json_reply(JSONResponse(result.model_dump(**by_alias), status))
    return replace(reply, response=result)


def _json_reply(response: Response) -> OpenAIReply:
    return OpenAIReply(response.status_code, bytes(response.body))


def _extra_headers(response: Response) -> Mapping[str, str]:
    known = ("content-type", "content-length")
    return {name: value for name, value in response.headers.items() if name not in known}


async def _chunks(content: AsyncIterable[Any]) -> AsyncIterator[bytes]:
    async for chunk in content:
        yield bytes(chunk)


async def _encoded(
    events: AsyncGenerator[Any, None], texts: TextEvents | None
) -> AsyncIterator[bytes]:
    """Yield vLLM's SSE events as bytes; closing this one closes vLLM's, which aborts.

    Chat and completions say in an event what ends them; the Responses API's generator raises.

    Raises:
        EngineDeadError: the engine is gone.
        LmiError: the request failed, in vLLM's words.
    """
    try:
        with ReadDirectly(DirectRequest(events=texts)):
            event = await anext(events, None)
        while event is not None:
            data = (event if isinstance(event, str) else _response_event(event)).encode()
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


def _response_event(event: Any) -> str:
    """Return an event of the Responses API as vLLM's route frames it: named, without [DONE]."""
    data = event.model_dump_json(indent=None, by_alias=True)
    return f"event: {getattr(event, 'type', 'unknown')}\ndata: {data}\n\n"


async def _validation_response(
    raw_request: Request, error: ValidationError, body: Mapping[str, object]
) -> Response:
    """Return what FastAPI and vLLM answer for a malformed request."""
    errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors(include_url=False)]
    return await validation_exception_handler(
        raw_request, RequestValidationError(errors, body=dict(body))
    )
