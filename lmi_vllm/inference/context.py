"""The context of one admitted request: its model, and every resource that it holds."""

import asyncio
import contextlib
import copy
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import PayloadError, StatusTable, UnknownAdapterError
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.queue import Holdings, RequestQueue
from lmi_vllm.inference.request.adapter_names import (
    ONE_ADAPTER,
    adapter_names,
    chosen_adapters,
    with_named,
)
from lmi_vllm.inference.request.lmi import KnownRequests
from lmi_vllm.inference.request.parameters import UnreadNames
from lmi_vllm.inference.request.tgi import TGI_NAMES
from lmi_vllm.inference.response.formatters import choose_framing
from lmi_vllm.inference.response.streams import (
    Deadline,
    ReplyStream,
    RowSink,
    SilenceLimit,
    StreamEnds,
    close_iterator,
)
from lmi_vllm.messages import Framing, InferenceCall, Reply, ServingProfile
from lmi_vllm.telemetry.records import current_record

ADAPTER_ALIAS_HEADER: Final = "x-amzn-sagemaker-adapter-alias"
_TIME_LIMIT: Final = "predict_timeout"


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """What parts of the model do with requests on `/invocations` and similar routes, in order."""

    checks: list["Check"] = field(default_factory=list)
    decoders: list["Decode"] = field(default_factory=list)
    answers: list["AnswerPayload"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The loaded model: its engine, how it is served, its adapters, its own hooks, its steps."""

    engine: Engine
    profile: ServingProfile
    adapters: AdapterRegistry
    hooks: Hooks = NO_HOOKS
    steps: ModelSteps = field(default_factory=ModelSteps)
    unread_names: UnreadNames = field(default_factory=UnreadNames)
    known_requests: KnownRequests = field(default_factory=KnownRequests)


class RequestContext:
    """One request for the model, from its admission to its end, on every route.

    As a context manager it takes a slot in the queue, applies the limits of features, and releases
    what the request holds: slots, adapters, work in the engine, time limits. That happens once: at
    its end, or when its stream is closed. A shutdown that cancels it becomes its error. Each
    adapter is taken once, so that all parts of the request use the same load of it.
    """

    def __init__(
        self,
        runtime: Runtime,
        queue: RequestQueue,
        call: InferenceCall,
        statuses: StatusTable,
        limits: Sequence["Limit"] = (),
    ) -> None:
        self.runtime = runtime
        self.queue = queue
        self.call = call
        self.statuses = statuses
        self.record = current_record()
        self.stream_ends = StreamEnds(queue, runtime.profile, statuses)
        self.adapters: tuple[Adapter | None, ...] = (None,)  # one for all prompts, or one for each
        self.base_name = ""  # for the engine, where `model` names an adapter and does not count
        # The adapter's hooks over those of the base model; only the base's if adapters differ.
        self.hooks = runtime.hooks
        # Whether prompts of a list have different adapters, and one of these has a formatter.
        self.needs_parts = False
        self._limits = limits
        self.also: Container[State] = ()  # states beside readiness in which it is admitted
        self.wake: Callable[[], Awaitable[Runtime]] | None = None  # wakes a model that rests
        self._held: dict[str, Adapter] = {}
        self._holdings = Holdings(queue, self.record)
        self._connect: Callable[[RowSink], None] | None = None
        self._is_delivered = False

    async def __aenter__(self) -> Self:
        """Take a slot in the queue.

        Raises:
            LmiError: the server starts, drains or has failed, the queue is full, a feature
                refuses the request, or a model that rests is not awake in time.
        """
        if self.record is not None:
            self.record.is_inference = True
        for check in self._limits:
            check(self)
        self._holdings.add(self.queue.take(also=self.also))
        # With the slot it keeps the model awake.
        if self.wake is not None and self.queue.lifecycle.is_resting:
            try:
                self._use(await self.wake())
            except BaseException as error:
                await self.__aexit__(type(error), error, None)
                raise
        return self

    def _use(self, runtime: Runtime) -> None:
        """Ask this model, whose engine was started after the request had come."""
        self.runtime, self.hooks = runtime, runtime.hooks
        self.stream_ends = StreamEnds(self.queue, runtime.profile, self.statuses)

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if not self._is_delivered:
                await self._holdings.release()
            if isinstance(error, asyncio.CancelledError):
                raise error
        except asyncio.CancelledError:
            if (shutdown := self.queue.shutdown_error()) is None:
                raise
            raise shutdown from None

    def deliver(self, reply: Reply) -> Reply:
        """Return the reply; a stream owns the resources from here on."""
        if reply.stream is None:
            return reply
        self._is_delivered = True
        stream = ReplyStream(reply.stream, self._holdings.release, self._connect)
        return replace(reply, stream=stream)

    def part(self, position: int) -> "RequestContext":
        """Return the context of one prompt of a list: a request of its own in the engine."""
        part = copy.copy(self)
        part.call = replace(self.call, request_id=f"{self.call.request_id}-{position}")
        return part

    def take_slots(self, name: str, sequences: int) -> None:
        """Take the further slots of a list: each of its sequences counts as a request.

        Raises:
            PayloadError: the list is longer than the queue.
            OverloadError: the queue has no room for it now.
        """
        if sequences > self.queue.limit:
            raise PayloadError(
                f"{name}: {sequences} sequences; job_queue_size allows {self.queue.limit}"
            )
        if sequences > 1:
            self._holdings.add(self.queue.take(sequences - 1, self.also))

    async def hold_adapters(
        self, payload: Any, check: Callable[["RequestContext", Any], None] | None = None
    ) -> None:
        """Take the adapters that the request names, and choose its hooks.

        `check` is called before they are loaded, unless code of theirs may change the payload.

        Raises:
            PayloadError: `adapters` is not a name, or a list of another length than the prompts.
            UnknownAdapterError: no adapter of that name; never the base model instead.
            RequestError: one is registered, but cannot be loaded now.
        """
        is_hooked = self.runtime.hooks.input is not None
        given = payload if isinstance(payload, dict) else {}
        fields = with_named(given, self.runtime.profile, is_hooked=is_hooked)
        adapters, model = self.runtime.adapters, fields.get("model")
        chosen = chosen_adapters(self.call, fields)
        names = adapter_names(chosen, fields, adapters.__contains__)
        if chosen:
            self.base_name = self._base_name(model)
        elif names == [None] and adapters.has_others:
            names = [await _adapter_of_model(adapters, model, self.deadline())]
        if names == [None]:
            self.adapters, self.hooks, self.needs_parts = (None,), self.runtime.hooks, False
            return
        if (
            check is not None
            and any(names)
            and not any(_may_have_code(name, adapters) for name in names)
        ):
            check(self, payload)
        self.adapters = tuple([await self._hold(name) if name else None for name in names])
        self._choose_hooks()

    def _choose_hooks(self) -> None:
        base, adapter = self.runtime.hooks, self.adapters[0]
        found = [base, *[one.hooks for one in self.adapters if one]]
        if all(hooks is NO_HOOKS for hooks in found):
            return
        differ = _differ(self.adapters)
        own = NO_HOOKS if adapter is None or differ else adapter.hooks
        self.hooks = own.over(base) if own.changes_requests else base
        self.needs_parts = differ and any(hooks.changes_requests for hooks in found)

    def check_model(self, payload: Mapping[str, Any]) -> None:
        """Check `model` beside `inputs`, where it may name an adapter.

        Raises:
            PayloadError: it is no name at all; the base model would answer.
            UnknownAdapterError: it is no name of the served model; that would answer instead.
        """
        profile, model = self.runtime.profile, payload.get("model")
        if not profile.enable_lora or model is None or any(self.adapters):
            return
        known = (*profile.served_names, "", *(TGI_NAMES if profile.tgi_compat else ()))
        if model in known or chosen_adapters(self.call, with_named(payload, profile)):
            return
        if not isinstance(model, str):
            raise PayloadError("model: expected the name of an adapter or of the served model")
        raise UnknownAdapterError(model)

    def _base_name(self, model: object) -> str:
        """Return the served model's name if `model` is, or may be, an adapter's."""
        adapters, served = self.runtime.adapters, self.runtime.profile.served_names
        if not isinstance(model, str) or model in served:
            return ""
        return served[0] if model in adapters or adapters.has_others else ""

    async def _hold(self, name: str) -> Adapter:
        if name not in self._held:
            alias = self.call.properties.get(ADAPTER_ALIAS_HEADER)
            if self.also:  # an adapter may have to be loaded, which a sleeping engine cannot do
                self.queue.lifecycle.check_ready()
            held = self.runtime.adapters.hold(name, alias)
            async with self.deadline():
                self._held[name] = await self._holdings.stack.enter_async_context(held)
            if self.record is not None:
                self.record.use_adapter(name)
        return self._held[name]

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of all prompts; None is the base model.

        Raises:
            PayloadError: there is one for each prompt.
        """
        if len(self.adapters) > 1:
            raise PayloadError(ONE_ADAPTER)
        return self.adapters[0]

    @property
    def framing(self) -> Framing:
        """The framing of a stream of this request."""
        profile = self.runtime.profile
        default = None if self.call.tgi_route else profile.output_formatter
        return choose_framing(self.call.accept, default, tgi_compat=profile.tgi_compat)

    def deadline(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Bound the time until the whole answer, or the first byte of a stream."""
        return Deadline(self.runtime.profile.predict_timeout, _TIME_LIMIT)

    def silence_limit(self) -> SilenceLimit:
        """Return the limit of a stream's pauses; its timer ends with the request."""
        limit = SilenceLimit(self.runtime.profile.predict_timeout, _TIME_LIMIT)
        self._holdings.add(limit.close)
        return limit

    def own_stream(
        self, items: AsyncIterator[object], connect: Callable[[RowSink], None] | None = None
    ) -> None:
        """Close `items` with the request, even if they were never read.

        With `connect` rows may be written directly to a sink.
        """
        self._holdings.stack.push_async_callback(close_iterator, items)
        self._connect = connect


# Refuses a request for the model by raising an `LmiError`, on every route.
Limit = Callable[[RequestContext], None]
# May answer in the place of the second argument, which answers the call, before admission.
Answer = Callable[[InferenceCall], Coroutine[Any, Any, Reply]]
Defer = Callable[[InferenceCall, Answer], Reply | None]
# Reads a body that is no object; None if it is not for this feature.
Decode = Callable[[RequestContext], dict[str, Any] | None]
# Checks an admitted request that no handler of users has answered, before its body is decoded.
Check = Callable[[InferenceCall], Awaitable[None]]
# May answer a decoded payload; None passes it on to the engine.
AnswerPayload = Callable[[RequestContext, Mapping[str, Any]], Awaitable[Reply | None]]


@dataclass(frozen=True, slots=True)
class RequestSteps:
    """What features do with requests of any model, in the order in which they were added.

    `limits` hold on every route that asks the model, `deferrals` on `/invocations` and similar
    ones. `is_process_bound` says of a request's properties whether it creates or reads state that
    only this process has.
    """

    limits: list[Limit] = field(default_factory=list)
    deferrals: list[Defer] = field(default_factory=list)
    is_process_bound: list[Callable[[Mapping[str, str]], bool]] = field(default_factory=list)


async def _adapter_of_model(
    adapters: AdapterRegistry, model: object, deadline: contextlib.AbstractAsyncContextManager[None]
) -> str | None:
    """Return the request's `model` if an adapter of that name can be found."""
    if not isinstance(model, str) or not model:
        return None
    async with deadline:
        return model if await adapters.find_on_demand(model) else None


def _may_have_code(name: str | None, adapters: AdapterRegistry) -> bool:
    """Whether an adapter has hooks, or is not here yet."""
    if not name:
        return False
    return name not in adapters or adapters.describe(name).hooks.are_some


def _differ(adapters: tuple[Adapter | None, ...]) -> bool:
    return len({None if adapter is None else adapter.name for adapter in adapters}) > 1
