"""The inference service behind the routes, and the state that requests share; no HTTP."""

from collections.abc import Container

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    DEFAULT_STATUSES,
    BadParameterError,
    NotReadyError,
    ResourceNotFoundError,
    StatusTable,
)
from lmi_vllm.inference import pipeline
from lmi_vllm.inference.context import RequestContext, RequestSteps, Runtime
from lmi_vllm.inference.engine_routes import READING, forward, pass_on
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.openai_lane import list_models
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.rest import Rest
from lmi_vllm.messages import HttpCall, HttpRoute, InferenceCall, Reply, RouteKind, ServingProfile
from lmi_vllm.telemetry.observers import Telemetry
from lmi_vllm.telemetry.records import RequestSummary, current_record


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
        self.rest = Rest(queue.lifecycle, queue.clock)
        self.profile = profile or ServingProfile()
        self.model_url = ""
        self.kept: dict[type, object] = {}  # what features keep of a server, by its class
        self.steps = RequestSteps()  # of features, for every model
        self.telemetry = telemetry or Telemetry()
        self.statuses = statuses
        self.telemetry.observers.append(self._count_failure)
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
        """The loaded model, whose engine may rest: `admitted` and `rest` wake it.

        Raises:
            NotReadyError: there is none yet.
        """
        if self.lifecycle.state is not State.HEALTHY:
            self.lifecycle.check_ready()
        if self._runtime is None:
            raise NotReadyError("no model is loaded")
        return self._runtime

    def _runtime_in(self, states: Container[State]) -> Runtime:
        """Return the loaded model, which in these states need not be ready."""
        is_reached = self.lifecycle.state in states
        return (self._runtime if is_reached else None) or self.runtime

    def check_model(self, name: str | None) -> None:
        """Check that `name` is the served model's, by one of its names, or that none was given.

        Raises:
            ResourceNotFoundError: another model is asked for.
            BadParameterError: none is given and none is loaded.
        """
        if name is None and not self.lifecycle.has_model:
            raise BadParameterError("Parameter model_name is required.")
        names = (self.lifecycle.model_name, *self.profile.served_names)
        if name is not None and (not self.lifecycle.has_model or name not in names):
            raise ResourceNotFoundError(
                f"Model or workflow not found: {name}", "ModelNotFoundException"
            )

    def admitted(self, call: InferenceCall, also: Container[State] = ()) -> RequestContext:
        """Return the context of a request, to be entered: what every request for the model needs.

        Raises:
            NotReadyError: the model does not answer now, and its state is none of `also`.
        """
        runtime = self._runtime_in(also) if also else self.runtime
        limits = self.steps.limits
        context = RequestContext(runtime, self.queue, call, self.statuses, limits)
        context.also, context.wake = also, self._woken
        return context

    async def _woken(self) -> Runtime:
        """Return the loaded model once it is awake: its engine may be another one by then."""
        await self.rest.awake()
        return self.runtime

    async def infer(self, call: InferenceCall) -> Reply:
        """Answer `/invocations` and similar routes: any kind of payload."""
        for defer in self.steps.deferrals:
            if (reply := defer(call, self.answer)) is not None:
                return reply
        return await self.answer(call)

    async def answer(self, call: InferenceCall) -> Reply:
        """Answer as `infer` does, and not later."""
        async with self.admitted(call) as context:
            return context.deliver(await pipeline.invoke(context))

    async def list_models(self, call: InferenceCall) -> Reply:
        """Return the served names and the adapters, also while asleep; needs no slot."""
        return await list_models(self._runtime_in([State.ASLEEP]), call)

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
        if route.kind is RouteKind.INFERENCE and http.method in route.methods:
            async with self.admitted(call, reached_by(route)) as context:
                return context.deliver(await forward(context, http, route))
        # A call that wakes the engine must reach it, also in a drain, which waits for requests that
        # a pause has kept, and for responses to be read.
        is_inference = route.kind is RouteKind.INFERENCE
        states = () if is_inference else (State.ASLEEP, State.DRAINING)
        is_served = http.method in route.methods  # else it is refused before the engine
        if http.method in READING or not is_served:  # it wakes nothing
            if is_served and route.kind is RouteKind.MANAGEMENT:
                self.rest.check_engine()
            return await pass_on(self._runtime_in(states), self.lifecycle, http, route)
        async with self.rest.kept_awake():
            return await pass_on(self._runtime_in(states), self.lifecycle, http, route)

    def expect_room(self, also: Container[State] = ()) -> None:
        """Refuse a request that would not be admitted now, before its body is read.

        Raises:
            NotReadyError: the server starts, drains or has failed.
            OverloadError: the queue is full.
        """
        if (record := current_record()) is not None:
            record.is_inference = True
        self.queue.check_room(also=also)

    def _count_failure(self, summary: RequestSummary) -> None:
        """Report what went wrong with a request for the model, once it has ended."""
        if summary.is_inference and (cause := summary.failure) is not None:
            self.lifecycle.note_failure(cause)


def reached_by(route: HttpRoute) -> Container[State]:
    """Return the states beside readiness in which a route of inference answers."""
    return () if route.needs_engine else (State.ASLEEP,)
