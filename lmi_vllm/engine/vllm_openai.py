"""vLLM's OpenAI handlers behind `answer`: its request models, its bytes, its error bodies.

The one file we expect to touch at a vLLM upgrade (engine-notes.md 7 lists where names moved).
"""

import logging
import secrets
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    validation_exception_handler,
)
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from lmi_vllm.engine.vllm_isolation import IsolatingAsyncLLM
from lmi_vllm.errors import EngineDeadError
from lmi_vllm.messages import AdapterRef, OpenAICall, OpenAIReply, ServingProfile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Route:
    """Which request model a kind is read into, and which handler method answers it."""

    request_model: type[Any]
    state_attribute: str
    method: str


ROUTES: Final[Mapping[str, _Route]] = MappingProxyType(
    {
        "chat/completions": _Route(
            ChatCompletionRequest, "openai_serving_chat", "create_chat_completion"
        ),
        "completions": _Route(CompletionRequest, "openai_serving_completion", "create_completion"),
    }
)


@dataclass(frozen=True, slots=True)
class _App:
    """What vLLM's handlers look up on a request's application."""

    state: State


class VllmOpenAI:
    """vLLM's handlers over one engine."""

    def __init__(self, app: _App, default_model: str) -> None:
        self._app = app
        self._default_model = default_model
        self._secret = secrets.token_hex(16)

    @classmethod
    async def create(
        cls, llm: IsolatingAsyncLLM, namespace: Namespace, profile: ServingProfile
    ) -> "VllmOpenAI":
        """Return the handlers, set up as `vllm serve` would with the same arguments."""
        namespace.served_model_name = list(profile.served_names)
        namespace.enable_auto_tool_choice = profile.enable_auto_tool_choice
        namespace.tool_call_parser = profile.tool_call_parser
        namespace.chat_template = profile.chat_template
        namespace.chat_template_content_format = profile.chat_template_content_format
        state = State()
        await init_app_state(llm, state, namespace, await llm.get_supported_tasks())
        return cls(_App(state), profile.served_names[0])

    def add_adapter(self, adapter: AdapterRef) -> None:
        """Let calls that carry this load of the adapter reach it.

        The path is the one users know; the engine's guard puts its private copy in its place.
        """
        known = self._app.state.openai_serving_models.lora_requests
        known[self._key(adapter)] = LoRARequest(adapter.name, adapter.engine_id, adapter.path)

    def remove_adapter(self, adapter: AdapterRef) -> None:
        """Stop calls from finding this load of the adapter; others of its name stay."""
        self._app.state.openai_serving_models.lora_requests.pop(self._key(adapter), None)

    def _key(self, adapter: AdapterRef) -> str:
        """Return what stands for one load in `model`: never a name that a client could send.

        vLLM looks adapters up by the name in the request, which by then may mean another load, or
        one that is being removed. The answer carries the adapter's own name all the same.
        """
        return f"{self._secret}-{adapter.engine_id}"

    def beam_search(
        self, prompt: Any, request_id: str, params: Any, lora_request: LoRARequest | None
    ) -> AsyncGenerator[Any, None]:
        """Return the one output of vLLM's beam search, which its completion handler has."""
        serving = self._app.state.openai_serving_completion
        outputs: AsyncGenerator[Any, None] = serving.beam_search(
            prompt, request_id, params, lora_request=lora_request
        )
        return outputs

    async def answer(self, call: OpenAICall) -> OpenAIReply:
        """Answer `call` with vLLM's bytes; faults of the request are replies.

        Raises:
            EngineDeadError: the engine is gone.
        """
        raw_request = self._raw_request(call)
        if call.kind == "models":
            served = self._app.state.openai_serving_models.registry
            models = await served.show_available_models()
            return _json_reply(JSONResponse(models.model_dump()))
        route = ROUTES[call.kind]
        body = {"model": self._default_model, **call.body}
        if call.adapter is not None:
            body["model"] = self._key(call.adapter)
        try:
            request = route.request_model.model_validate(body)
        except ValidationError as error:
            return await _validation_reply(raw_request, error, call.body)
        result = await self._handle(route, request, raw_request)
        if isinstance(result, ErrorResponse):
            return _json_reply(JSONResponse(result.model_dump(), result.error.code))
        if isinstance(result, AsyncGenerator):
            return OpenAIReply(200, content_type="text/event-stream", stream=_encoded(result))
        return _json_reply(JSONResponse(result.model_dump()))

    async def _handle(self, route: _Route, request: Any, raw_request: Request) -> Any:
        handler = getattr(self._app.state, route.state_attribute, None)
        if handler is None:
            return create_error_response(
                NotImplementedError(f"The model does not support {raw_request.url.path}")
            )
        try:
            return await getattr(handler, route.method)(request, raw_request)
        except VllmEngineDeadError as error:
            raise EngineDeadError from error
        except Exception as error:
            reply = create_error_response(error)
            if reply.error.code >= 500:  # noqa: PLR2004 (the server's fault: worth a trace)
                logger.exception("vLLM failed on %s", raw_request.url.path)
            return reply

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


def _json_reply(response: JSONResponse) -> OpenAIReply:
    return OpenAIReply(response.status_code, bytes(response.body))


async def _encoded(events: AsyncGenerator[str, None]) -> AsyncIterator[bytes]:
    """Yield vLLM's SSE events as bytes; closing this one closes vLLM's, which aborts."""
    try:
        async for event in events:
            yield event.encode()
    finally:
        await events.aclose()


async def _validation_reply(
    raw_request: Request, error: ValidationError, body: Mapping[str, object]
) -> OpenAIReply:
    """Return the body FastAPI and vLLM give for a malformed request."""
    errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors(include_url=False)]
    response = await validation_exception_handler(
        raw_request, RequestValidationError(errors, body=dict(body))
    )
    return _json_reply(response)
