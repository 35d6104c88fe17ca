"""Admit a request, put hooks around it and hand it to its lane; knows no HTTP."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import orjson

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    BadParameterError,
    LmiError,
    NotReadyError,
    PayloadError,
    ResourceNotFoundError,
    RouteFamily,
)
from lmi_vllm.inference import tgi
from lmi_vllm.inference.deferred import STARTING_TOKEN, DeferredResults, is_deferred
from lmi_vllm.inference.generation import generate
from lmi_vllm.inference.hooks.functions import NO_HOOKS
from lmi_vllm.inference.hooks.hooked import (
    UNHOOKED_KINDS,
    apply_input_hook,
    decode_payload,
    differing_adapters,
    formatted,
    has_hooks,
    joined,
    openai_request,
    request_content,
    select_hooks,
)
from lmi_vllm.inference.model_control import ModelControl, ModelInfo, OneModelOnly
from lmi_vllm.inference.model_list import with_adapters
from lmi_vllm.inference.openai_lane import ask_openai
from lmi_vllm.inference.pooling import GENERATE, parse_pooling_request, vectors_reply
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.request.bodies import decode_body
from lmi_vllm.inference.request.parameters import UnreadNames
from lmi_vllm.inference.request.payload import Family, dispatch, with_adapter_id
from lmi_vllm.inference.request_hold import RequestHold
from lmi_vllm.inference.request_work import RequestWork
from lmi_vllm.inference.response.formatters import FRAMINGS
from lmi_vllm.inference.response.openai_replies import OpenAIDialect, lmi_reply
from lmi_vllm.inference.response.stream_ends import lmi_family
from lmi_vllm.inference.response.streams import gathered
from lmi_vllm.inference.runtime import Runtime
from lmi_vllm.inference.sessions import Sessions, is_session_request
from lmi_vllm.messages import InferenceCall, OpenAICall, Reply, ServingProfile
from lmi_vllm.telemetry.hub import Telemetry
from lmi_vllm.telemetry.records import current_record


class InferenceService:
    """Answers inference calls; made at once, its runtime attached when the engine is up."""

    def __init__(
        self,
        queue: RequestQueue,
        profile: ServingProfile | None = None,
        *,
        deferred: DeferredResults | None = None,
    ) -> None:
        self.queue = queue
        self.lifecycle = queue.lifecycle
        self.profile = profile or ServingProfile()
        self.model = ModelInfo()
        self.models: ModelControl = OneModelOnly()
        self.sessions = Sessions()
        self.deferred = deferred or DeferredResults()
        self.telemetry = Telemetry()
        self._unread_names = UnreadNames()
        self._runtime: Runtime | None = None

    def expect(self, model: ModelInfo, profile: ServingProfile, sessions: Sessions) -> None:
        """Describe the model that is being started; requests reach it when its runtime is there."""
        self.model, self.profile, self.sessions = model, profile, sessions

    def manage_models(self, control: ModelControl) -> None:
        """Let the management routes load and unload models with `control`."""
        self.models = control

    def attach(self, runtime: Runtime) -> None:
        """Let requests reach the engine."""
        self._runtime = runtime
        self.profile = runtime.profile

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine of the loaded model, ready or not; None before there was one."""
        return None if self._runtime is None else self._runtime.engine

    @property
    def registered_adapters(self) -> tuple[Adapter, ...]:
        """The adapters requests may name, loaded or not; none before there is a model."""
        return () if self._runtime is None else tuple(self._runtime.adapters)

    def detach(self) -> None:
        """Forget the model: it has been unloaded."""
        self._runtime = None
        self.profile = ServingProfile()
        self.model = ModelInfo()

    @property
    def runtime(self) -> Runtime:
        """The loaded model.

        Raises:
            NotReadyError: there is none yet.
        """
        self.lifecycle.check_ready()
        if self._runtime is None:
            raise NotReadyError("no model is loaded")
        return self._runtime

    def check_model(self, name: str | None) -> None:
        """Return when `name` is served here, or none was given.

        Raises:
            ResourceNotFoundError: another model is asked for.
            BadParameterError: none is given and none is loaded.
        """
        if name is None and not self.lifecycle.has_model:
            raise BadParameterError("Parameter model_name is required.")
        if name is not None and (not self.lifecycle.has_model or name != self.lifecycle.model_name):
            raise ResourceNotFoundError(
                f"Model or workflow not found: {name}", "ModelNotFoundException"
            )

    async def infer(self, call: InferenceCall) -> Reply:
        """Answer `/invocations` and its like: every payload family, by dispatch; or later."""
        if (token := call.properties.get(STARTING_TOKEN)) is not None:
            return self.deferred.read(token, call.properties)
        if is_deferred(call.properties):
            self.queue.check_room()  # a refusal is answered now, not later
            return self.deferred.start(self._until_shutdown(self._infer(call)))
        return await self._until_shutdown(self._infer(call))

    async def answer_openai(self, call: InferenceCall, kind: str) -> Reply:
        """Answer a `/v1` route with vLLM's own bytes."""
        return await self._until_shutdown(self._answer_openai(call, kind))

    async def tokenize_tgi(self, call: InferenceCall) -> Reply:
        """Answer TGI's `/tokenize`."""
        return await self._until_shutdown(self._tokenize_tgi(call))

    async def answer_about_stored(
        self, call: InferenceCall, kind: str, arguments: Mapping[str, object]
    ) -> Reply:
        """Answer about an earlier response of the Responses API; no engine work, no queue."""
        answer = await self.runtime.engine.answer_openai(
            OpenAICall(kind, arguments, call.properties, call.request_id)
        )
        return Reply(answer.status, answer.content_type, answer.body, answer.stream)

    def describe_tgi(self) -> dict[str, Any]:
        """Return what TGI's `/info` says."""
        runtime = self.runtime
        return tgi.describe(self.model.url, runtime.engine, runtime.profile)

    def expect_room(self) -> None:
        """Refuse what could not be admitted now, before its body is read into memory.

        Raises:
            NotReadyError: the server starts, drains or has failed.
            OverloadError: the queue is full.
        """
        if (record := current_record()) is not None:
            record.is_inference = True
        try:
            self.queue.check_room()
        except LmiError as refusal:
            self.lifecycle.error_rates.record(refusal)
            raise

    async def _until_shutdown(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Return the reply; a shutdown that cuts it off is an error with an answer."""
        if (record := current_record()) is not None:
            record.is_inference = True
        rates = self.lifecycle.error_rates
        try:
            reply = await work
        except asyncio.CancelledError:
            error = self.queue.shutdown_error()
            if error is None:
                raise
            raise error from None
        except LmiError as raised:
            rates.record(raised)
            raise
        rates.record_status(reply.status)
        return reply

    def _work(self, runtime: Runtime, call: InferenceCall, hold: RequestHold) -> RequestWork:
        return RequestWork(self.queue, runtime, call, hold, self._unread_names)

    async def _infer(self, call: InferenceCall) -> Reply:
        runtime = self.runtime
        async with RequestHold() as hold:
            work = self._work(runtime, call, hold)
            hold.enter_context(self.queue.admit())
            reply = await runtime.code.handle(call, request_content(call))
            if reply is None:
                await self.sessions.check(call.properties)
                payload = decode_payload(runtime.code, runtime.adapters, call)
                payload = with_adapter_id(payload, runtime.profile)
                reply = await self._answer(work, payload)
            return work.held(reply)

    async def _answer(self, work: RequestWork, payload: Any) -> Reply:
        """Answer a decoded payload, its adapter's hooks around it."""
        runtime, call = work.runtime, work.call
        code, adapters = runtime.code, runtime.adapters
        names = differing_adapters(call, payload, adapters)
        if names and await has_hooks(code, adapters, call, names, work.hold):
            return await self._answer_each(work, payload, names)
        hooks, name = NO_HOOKS, None
        if not names:
            hooks, name = await select_hooks(code, adapters, call, payload, work.hold)
        payload = await apply_input_hook(code, hooks, call, payload, name)
        if runtime.profile.task == GENERATE and is_session_request(payload):
            return await self.sessions.answer(payload, call.properties)
        if hooks.output is not None:
            kind, body = openai_request(runtime.profile, adapters, call, payload)
            answer = await ask_openai(work, kind, body)
            return await formatted(code, hooks.output, call, payload, answer)
        if runtime.profile.task != GENERATE:
            return await _pool(work, payload)
        family = Family.GENERATION if call.tgi_route else dispatch(payload)
        if family is Family.GENERATION:
            return await generate(work, payload)
        if (record := current_record()) is not None:
            record.dialect = str(RouteFamily.OPENAI)
        dialect = OpenAIDialect(lmi_family(runtime.profile), work.framing())
        return lmi_reply(
            await ask_openai(work, family, payload, dialect), dialect.framing.content_type
        )

    async def _answer_each(
        self, work: RequestWork, payload: dict[str, Any], names: list[str | None]
    ) -> Reply:
        """Answer each prompt of a list as a request of its own: their adapters' hooks differ."""
        work.admit_list("inputs", len(names))
        parts = enumerate(zip(payload["inputs"], names, strict=True))
        works = [
            self._answer(work.part(position), {**payload, "inputs": prompt, "adapters": name or ""})
            for position, (prompt, name) in parts
        ]
        replies = await gathered(works)
        if any(reply.stream is not None for reply in replies):
            raise PayloadError("inputs: streaming takes one prompt, not a list")
        bodies = [reply.body for reply in replies]
        return Reply(200, FRAMINGS["json"].content_type, joined(bodies))

    async def _answer_openai(self, call: InferenceCall, kind: str) -> Reply:
        runtime = self.runtime
        if kind == "models":
            answer = await runtime.engine.answer_openai(
                OpenAICall("models", {}, call.properties, call.request_id)
            )
            listed = with_adapters(answer.body, runtime.adapters)
            return Reply(answer.status, answer.content_type, listed)
        async with RequestHold() as hold:
            work = self._work(runtime, call, hold)
            hold.enter_context(self.queue.admit())
            code, is_hooked = runtime.code, kind not in UNHOOKED_KINDS
            if is_hooked and (own := await code.handle(call, request_content(call))) is not None:
                return work.held(own)
            payload: Any = decode_body(call.body, "application/json")
            hooks, name = await select_hooks(code, runtime.adapters, call, payload, hold)
            hooks = hooks if is_hooked else NO_HOOKS
            payload = await apply_input_hook(code, hooks, call, payload, name)
            answer = await ask_openai(work, kind, payload)
            reply = Reply(
                answer.status, answer.content_type, answer.body, answer.stream, answer.headers
            )
            if hooks.output is not None and answer.status == 200:  # noqa: PLR2004 (success)
                reply = await code.format_output(hooks.output, call, payload, answer)
            return work.held(reply)

    async def _tokenize_tgi(self, call: InferenceCall) -> Reply:
        runtime = self.runtime
        with self.queue.admit():
            payload = decode_body(call.body, "application/json")
            tokens = await tgi.tokenize(payload, runtime.engine)
        return Reply(200, "application/json", orjson.dumps(tokens) + b"\n")


async def _pool(work: RequestWork, payload: dict[str, Any]) -> Reply:
    """Answer on a model that embeds, classifies or ranks."""
    runtime = work.runtime
    request = parse_pooling_request(payload, runtime.profile, runtime.adapters.__contains__)
    answer = await ask_openai(work, request.kind, request.body)
    if request.is_vectors and answer.status == 200:  # noqa: PLR2004 (success)
        return vectors_reply(answer)
    return lmi_reply(answer)
