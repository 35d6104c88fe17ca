"""The inference service behind the routes, with the state that requests share; no HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    DEFAULT_STATUSES,
    BadParameterError,
    LmiError,
    NotReadyError,
    ResourceNotFoundError,
    StatusTable,
)
from lmi_vllm.inference import pipeline
from lmi_vllm.inference.admission import Admission
from lmi_vllm.inference.context import RequestContext, RequestStep, Runtime
from lmi_vllm.inference.engine_routes import forward
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.openai_lane import ask_unqueued
from lmi_vllm.messages import HttpCall, HttpRoute, InferenceCall, Reply, RouteKind, ServingProfile
from lmi_vllm.telemetry.observers import Telemetry
from lmi_vllm.telemetry.records import current_record

_SUCCESS = 200
Answer = Callable[[RequestContext], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a description says of the model besides its state."""

    url: str = ""
    is_loaded_at_startup: bool = True
    start_time: str = ""
    device_type: str = "cpu"
    batch_size: int = 1
    max_batch_delay: int = 100  # milliseconds
    max_idle_time: int = 60  # seconds
    # Figures for clients that check them: one engine serves whatever comes.
    min_workers: int = 1
    max_workers: int = 1


class InferenceService:
    """Answers inference calls; made at once, its runtime attached when the engine is up."""

    def __init__(
        self,
        queue: Admission,
        profile: ServingProfile | None = None,
        *,
        statuses: StatusTable = DEFAULT_STATUSES,
    ) -> None:
        self.queue = queue
        self.lifecycle = queue.lifecycle
        self.profile = profile or ServingProfile()
        self.model = ModelInfo()
        self.models: object | None = None  # an extra's that loads models; None: the start's stays
        self.steps: list[RequestStep] = []  # of extras, in the way of /invocations and its like
        self.telemetry = Telemetry()
        self.statuses = statuses
        self._runtime: Runtime | None = None

    def expect(self, model: ModelInfo, profile: ServingProfile) -> None:
        """Describe the model that is being started; requests reach it when its runtime is there."""
        self.model, self.profile = model, profile

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
        """Answer `/invocations` and its like: every kind of payload."""
        answer = partial(self.answer, call, partial(pipeline.invoke, steps=self.steps))
        for step in self.steps:
            if (reply := await step.before(call, answer)) is not None:
                return reply
        return await answer()

    async def answer_openai(
        self, call: InferenceCall, kind: str, payload: dict[str, Any] | None = None
    ) -> Reply:
        """Answer a `/v1` route with vLLM's own bytes; `payload` is the body where it was read."""
        if kind == "models":
            return await self.answer(call, lambda it: ask_unqueued(it.runtime, call, kind, {}))
        return await self.answer(call, partial(pipeline.ask, kind=kind, payload=payload))

    def find_route(self, method: str, path: str) -> HttpRoute | None:
        """Return the route of the engine's own HTTP application that a request means."""
        application = None if self._runtime is None else self._runtime.engine.http
        return None if application is None else application.find(method, path)

    @property
    def has_user_middleware(self) -> bool:
        """Whether all requests go to the engine's application, past our lanes (user middleware)."""
        application = None if self._runtime is None else self._runtime.engine.http
        return application is not None and application.has_user_middleware

    async def forward(self, call: InferenceCall, http: HttpCall, route: HttpRoute) -> Reply:
        """Answer a route of the engine's own HTTP application."""
        if route.kind is not RouteKind.INFERENCE:
            # What wakes an engine has to reach it.
            is_asleep = self.lifecycle.state is State.ASLEEP
            runtime = (self._runtime if is_asleep else None) or self.runtime
            context = RequestContext(runtime, self.queue, call, self.statuses)
            return await forward(context, http, route)
        return await self.answer(call, partial(forward, http=http, route=route))

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
            self.lifecycle.note_failure(refusal.fault)
            raise

    async def answer(self, call: InferenceCall, answer: Answer) -> Reply:
        """Return what `answer` makes of the call; a shutdown that cuts it off is an error."""
        if (record := current_record()) is not None:
            record.is_inference = True
        try:
            reply = await answer(RequestContext(self.runtime, self.queue, call, self.statuses))
        except asyncio.CancelledError:
            error = self.queue.shutdown_error()
            if error is None:
                raise
            raise error from None
        except LmiError as raised:
            self.lifecycle.note_failure(raised.fault)
            raise
        if reply.status != _SUCCESS:
            self.lifecycle.note_failure(reply.status)
        return reply
