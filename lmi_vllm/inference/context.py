"""The context of one admitted request: its model, and every resource that it holds."""

import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import PayloadError, StatusTable, UnknownAdapterError
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.inference.queue import Holdings, RequestQueue
from lmi_vllm.inference.request.lmi import NAMES_OF_ADAPTERS
from lmi_vllm.inference.request.parameters import UnreadNames
from lmi_vllm.inference.response.formatters import choose_framing
from lmi_vllm.inference.response.streams import (
    ReplyStream,
    RowSink,
    SilenceLimit,
    StreamEnds,
    close_iterator,
    deadline,
)
from lmi_vllm.messages import Framing, InferenceCall, Reply, ServingProfile
from lmi_vllm.telemetry.records import current_record

ADAPTER_HEADER: Final = "x-amzn-sagemaker-adapter-identifier"
ADAPTER_ALIAS_HEADER: Final = "x-amzn-sagemaker-adapter-alias"
ANY_MODEL: Final = ("tgi", "dummy")  # that clients of TGI send as `model`
_LENGTHS_DIFFER: Final = "Number of adapters is not equal to the number of inputs"
_TIME_LIMIT: Final = "predict_timeout"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The loaded model: its engine, how it is served, its adapters and its own hooks."""

    engine: Engine
    profile: ServingProfile
    adapters: AdapterRegistry
    hooks: Hooks = NO_HOOKS
    unread_names: UnreadNames = field(default_factory=UnreadNames)


class RequestContext:
    """Owns what a request holds, and releases it once: at its end, or when its stream is closed.

    A request holds slots in the queue, adapters, work in the engine, and time limits. Each adapter
    is taken once, so that all parts of the request use the same load of it.
    """

    def __init__(
        self, runtime: Runtime, queue: RequestQueue, call: InferenceCall, statuses: StatusTable
    ) -> None:
        self.runtime = runtime
        self.queue = queue
        self.call = call
        self.statuses = statuses
        self.record = current_record()
        self.stream_ends = StreamEnds(queue, runtime.profile, statuses)
        self.adapters: tuple[Adapter | None, ...] = (None,)  # one for all prompts, or one for each
        self.base_name = ""  # for the engine, where `model` names an adapter and does not count
        self._held: dict[str, Adapter] = {}
        self._holdings = Holdings(queue, self.record)
        self._connect: Callable[[RowSink], None] | None = None
        self._is_delivered = False

    async def __aenter__(self) -> Self:
        """Take a slot in the queue.

        Raises:
            NotReadyError: the server starts, drains or has failed.
            OverloadError: the queue is full.
        """
        self._holdings.add(self.queue.take())
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_delivered:
            await self._holdings.release()

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
            self._holdings.add(self.queue.take(sequences - 1))

    async def hold_adapters(self, payload: Any, check: Callable[[], None] | None = None) -> None:
        """Take the adapters that the request names.

        `check` is called before they are loaded, unless code of theirs may change the payload.

        Raises:
            PayloadError: `adapters` is not a name, or a list of another length than the prompts.
            UnknownAdapterError: no adapter of that name; never the base model instead.
            RequestError: one is registered, but cannot be loaded now.
        """
        fields = _with_named(payload, self.runtime.profile) if isinstance(payload, dict) else {}
        adapters = self.runtime.adapters
        names, model = adapter_names(self.call, fields, adapters.__contains__), fields.get("model")
        if _chosen(self.call, fields):
            self.base_name = self._base_name(model)
        elif names == [None] and adapters.has_others:
            names = [await _adapter_of_model(adapters, model, self.deadline())]
        if (
            check is not None
            and any(names)
            and not any(_may_have_code(name, adapters) for name in names)
        ):
            check()
        self.adapters = tuple([await self._hold(name) if name else None for name in names])

    def check_model(self, payload: Mapping[str, Any]) -> None:
        """Check `model` beside `inputs`, where it may name an adapter.

        Raises:
            PayloadError: it is no name at all; the base model would answer.
            UnknownAdapterError: it is no name of the served model; that would answer instead.
        """
        profile, model = self.runtime.profile, payload.get("model")
        if not profile.enable_lora or model is None or any(self.adapters):
            return
        known = (*profile.served_names, "", *(ANY_MODEL if profile.tgi_compat else ()))
        if model in known or _chosen(self.call, _with_named(payload, profile)):
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
            raise PayloadError(_LENGTHS_DIFFER)
        return self.adapters[0]

    @property
    def hooks(self) -> Hooks:
        """The adapter's hooks over those of the base model; only the base's if adapters differ."""
        base, adapter = self.runtime.hooks, self.adapters[0]
        own = NO_HOOKS if adapter is None or _differ(self.adapters) else adapter.hooks
        return own.over(base) if own.input or own.output or own.tokens else base

    @property
    def needs_parts(self) -> bool:
        """Whether prompts of a list have different adapters, and one of these has a formatter."""
        hooks = [adapter.hooks for adapter in self.adapters if adapter]
        has_hooks = any(
            one.input or one.output or one.tokens for one in (self.runtime.hooks, *hooks)
        )
        return has_hooks and _differ(self.adapters)

    @property
    def framing(self) -> Framing:
        """The framing of a stream of this request."""
        profile = self.runtime.profile
        default = None if self.call.tgi_route else profile.output_formatter
        return choose_framing(self.call.accept, default, tgi_compat=profile.tgi_compat)

    def deadline(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Bound the time until the whole answer, or the first byte of a stream."""
        return deadline(self.runtime.profile.predict_timeout, _TIME_LIMIT)

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


class RequestStep:
    """A middleware step of an extra on inference routes; the methods of this base do nothing."""

    async def before(
        self, call: InferenceCall, answer: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> Reply | None:
        """Return an answer before admission; None passes the request on to `answer`."""
        return None

    async def check(self, call: InferenceCall) -> None:
        """Check an admitted request before its body is decoded; not called for users' handlers.

        Raises:
            LmiError: it is refused.
        """

    def undecoded(self, context: RequestContext) -> dict[str, Any] | None:
        """Return the payload of a body that is no object; None if it is not for this step."""
        return None

    async def answer(self, context: RequestContext, payload: Mapping[str, Any]) -> Reply | None:
        """Return an answer to the decoded payload; None passes it on to the engine."""
        return None

    def is_process_bound(self, properties: Mapping[str, str]) -> bool:
        """Whether the request creates or reads state that only this process has."""
        return False


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


def _with_named(payload: Mapping[str, Any], profile: ServingProfile) -> Mapping[str, Any]:
    """Return the payload with the adapter that `parameters` of LMI or TGI name as `adapters`."""
    parameters = payload.get("parameters")
    if "adapters" in payload or "inputs" not in payload or not isinstance(parameters, dict):
        return payload
    named = (parameters.get(name) for name in NAMES_OF_ADAPTERS)
    name = next((one for one in named if one is not None), None)
    is_read = name is not None and (profile.enable_lora or profile.tgi_compat)
    return {**payload, "adapters": name} if is_read else payload


def _differ(adapters: tuple[Adapter | None, ...]) -> bool:
    return len({None if adapter is None else adapter.name for adapter in adapters}) > 1


def adapter_names(
    call: InferenceCall, payload: Mapping[str, Any], is_adapter: Callable[[str], bool]
) -> list[str | None]:
    """Return the adapter of all prompts, or one for each of a list; None is the base model.

    The first of these that is set counts: the header, the query, `adapters`, and `model` if it
    names an adapter (otherwise it is a name of the served model). Empty text, null and an empty
    list are set, and mean the base model.

    Raises:
        PayloadError: `adapters` is neither a name nor a list of one name for each prompt.
    """
    chosen, model, inputs = _chosen(call, payload), payload.get("model"), payload.get("inputs")
    if not chosen:
        return [model if isinstance(model, str) and is_adapter(model) else None]
    given = chosen[0]
    if isinstance(given, list) and given and isinstance(inputs, list):
        return _listed_names(given, len(inputs))
    return [_single_name(given)]


def _chosen(call: InferenceCall, payload: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what the header, the query and `adapters` say, of those that are set."""
    places = ((call.properties, ADAPTER_HEADER), (call.query, "adapter"), (payload, "adapters"))
    return tuple(place[name] for place, name in places if name in place)


def _listed_names(given: list[Any], prompts: int) -> list[str | None]:
    if len(given) != prompts:
        raise PayloadError(_LENGTHS_DIFFER)
    if not all(isinstance(name, str) or name is None for name in given):
        raise PayloadError("adapters: expected a list of names")
    return [name or None for name in given]


def _single_name(given: object) -> str | None:
    if isinstance(given, list):
        if len(given) > 1:
            raise PayloadError(_LENGTHS_DIFFER)
        given = given[0] if given else None
    if given is not None and not isinstance(given, str):
        raise PayloadError("adapters: expected a name or a list of names")
    return given or None
