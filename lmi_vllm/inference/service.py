"""The inference service behind the routes, and the state that requests share; no HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
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
from lmi_vllm.inference.context import RequestContext, RequestStep, Runtime
from lmi_vllm.inference.engine_routes import forward
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.messages import HttpCall, HttpRoute, InferenceCall, Reply, RouteKind, ServingProfile
from lmi_vllm.telemetry.observers import Telemetry
from lmi_vllm.telemetry.records import current_record

_SUCCESS = 200
Answer = Callable[[RequestContext], Awaitable[Reply]]


class InferenceService:
    """Answers inference calls; its runtime is attached when the engine has started."""

    def __init__(
        self,
        queue: RequestQueue,
        profile: ServingProfile | None = None,
        *,
        statuses: StatusTable = DEFAULT_STATUSES,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.queue = queue
        self.lifecycle = queue.lifecycle
        self.profile = profile or ServingProfile()
        self.model_url = ""
        self.kept: dict[type, object] = {}  # what extras keep of a server, by its class
        self.steps: list[RequestStep] = []  # of extras, on /invocations and similar routes
        self.telemetry = telemetry or Telemetry()
        self.statuses = statuses
        self._runtime: Runtime | None = None

    def expect(self, model_url: str, profile: ServingProfile) -> None:
        """Describe the model that is being started; requests reach it when its runtime is there."""
        self.model_url, self.profile = model_url, profile

    def attach(self, runtime: Runtime) -> None:
        """Let requests reach the engine."""
        self._runtime = runtime
        self.profile = runtime.profile

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine of the loaded model, ready or not; None before there is one."""
        return None if self._runtime is None else self._runtime.engine

    @property
    def registered_adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may name, loaded or not; none before there is a model."""
        return () if self._runtime is None else tuple(self._runtime.adapters)

    def detach(self) -> None:
        """Drop the model, which has been unloaded."""
        self._runtime = None
        self.profile = ServingProfile()
        self.model_url = ""

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
        """Check that `name` is the served model, or that none was given.

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
        """Answer `/invocations` and similar routes: any kind of payload."""
        answer = partial(self.answer, call, partial(pipeline.invoke, steps=self.steps))
        for step in self.steps:
            if (reply := await step.before(call, answer)) is not None:
                return reply
        return await answer()

    async def answer_openai(
        self, call: InferenceCall, kind: str, payload: dict[str, Any] | None = None
    ) -> Reply:
        """Answer a `/v1` route with vLLM's own bytes; `payload` is the body, if it was read."""
        return await self.answer(call, partial(pipeline.ask, kind=kind, payload=payload))

    def find_route(self, method: str, path: str) -> HttpRoute | None:
        """Return the route of a request in the engine's own HTTP application."""
        application = None if self._runtime is None else self._runtime.engine.http
        return None if application is None else application.find(method, path)

    @property
    def sees_every_request(self) -> bool:
        """Whether all requests go to the engine's application instead of our lanes."""
        application = None if self._runtime is None else self._runtime.engine.http
        return application is not None and application.sees_every_request

    async def forward(self, call: InferenceCall, http: HttpCall, route: HttpRoute) -> Reply:
        """Answer a route of the engine's own HTTP application."""
        if route.kind is not RouteKind.INFERENCE:
            # A call that wakes the engine must reach it, and a drain waits for responses to be
            # read.
            reached = [State.ASLEEP]
            reached += [State.DRAINING] * (route.kind is RouteKind.INFORMATION)
            is_reached = self.lifecycle.state in reached
            runtime = (self._runtime if is_reached else None) or self.runtime
            context = RequestContext(runtime, self.queue, call, self.statuses)
            return await forward(context, http, route)
        return await self.answer(call, partial(forward, http=http, route=route))

    def expect_room(self) -> None:
        """Refuse a request that would not be admitted now, before its body is read.

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
        """Return the result of `answer`; if a shutdown cancels it, raise an error."""
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
