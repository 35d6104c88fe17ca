"""Join payload, adapter, engine and formatter into a `Reply`; knows no HTTP."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    BadParameterError,
    LmiError,
    NotReadyError,
    PayloadError,
    ResourceNotFoundError,
    RouteFamily,
)
from lmi_vllm.hooks.functions import NO_HOOKS
from lmi_vllm.inference import tgi
from lmi_vllm.inference.adapter_selection import (
    ADAPTER_ALIAS_HEADER,
    adapter_name,
    adapter_names,
)
from lmi_vllm.inference.adapters import Adapter, AdapterRegistry
from lmi_vllm.inference.admission import Admission
from lmi_vllm.inference.bodies import decode_body
from lmi_vllm.inference.custom_code import CustomCode
from lmi_vllm.inference.deferred import STARTING_TOKEN, DeferredResults, is_deferred
from lmi_vllm.inference.formatters import (
    FRAMINGS,
    Framing,
    Schema,
    StreamFormatter,
    choose_framing,
    choose_schema,
    encode_results,
)
from lmi_vllm.inference.generation import gather_results, make_job
from lmi_vllm.inference.hooked import (
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
from lmi_vllm.inference.limits import check_limits, sequence_count
from lmi_vllm.inference.model_control import ModelControl, ModelInfo, OneModelOnly
from lmi_vllm.inference.model_list import with_adapters
from lmi_vllm.inference.openai_replies import V1_DIALECT, OpenAIDialect, lmi_reply
from lmi_vllm.inference.parameters import UnreadNames
from lmi_vllm.inference.payload import (
    Family,
    LmiRequest,
    dispatch,
    parse_lmi_request,
    with_adapter_id,
)
from lmi_vllm.inference.pooling import (
    GENERATE,
    parse_pooling_request,
    vectors_reply,
)
from lmi_vllm.inference.request_hold import RequestHold
from lmi_vllm.inference.sessions import Sessions, is_session_request
from lmi_vllm.inference.stream_ends import DirectRows, StreamEnds, lmi_family
from lmi_vllm.inference.streams import (
    DirectStream,
    HeldStream,
    SilenceLimit,
    close_iterator,
    deadline_error,
    gathered,
)
from lmi_vllm.messages import (
    AdapterRef,
    GenerationJob,
    InferenceCall,
    OpenAICall,
    OpenAIReply,
    Reply,
    ServingProfile,
)
from lmi_vllm.telemetry.hub import Telemetry
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What exists only once a model is loaded."""

    engine: Engine
    profile: ServingProfile
    adapters: AdapterRegistry
    code: CustomCode = field(default_factory=CustomCode)


class InferenceService:
    """Answers inference calls; made at once, its runtime attached when the engine is up."""

    def __init__(self, admission: Admission, profile: ServingProfile | None = None) -> None:
        self.admission = admission
        self.profile = profile or ServingProfile()
        self.model = ModelInfo()
        self.models: ModelControl = OneModelOnly()
        self.sessions = Sessions()
        self.deferred = DeferredResults()
        self.telemetry = Telemetry()
        self._unread_names = UnreadNames()
        self._runtime: Runtime | None = None

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
        self.admission.check_ready()
        if self._runtime is None:
            raise NotReadyError("no model is loaded")
        return self._runtime

    def check_model(self, name: str | None) -> None:
        """Return when `name` is served here, or none was given.

        Raises:
            ResourceNotFoundError: another model is asked for.
            BadParameterError: none is given and none is loaded.
        """
        if name is None and not self.admission.has_model:
            raise BadParameterError("Parameter model_name is required.")
        if name is not None and (not self.admission.has_model or name != self.admission.model_name):
            raise ResourceNotFoundError(
                f"Model or workflow not found: {name}", "ModelNotFoundException"
            )

    async def infer(self, call: InferenceCall) -> Reply:
        """Answer `/invocations` and its like: every payload family, by dispatch; or later."""
        if (token := call.properties.get(STARTING_TOKEN)) is not None:
            return self.deferred.read(token, call.properties)
        if is_deferred(call.properties):
            self.admission.check_room()  # a refusal is answered now, not later
            return self.deferred.start(self._until_shutdown(self._infer(call)))
        return await self._until_shutdown(self._infer(call))

    async def answer_openai(self, call: InferenceCall, kind: str) -> Reply:
        """Answer a `/v1` route with vLLM's own bytes."""
        return await self._until_shutdown(self._answer_openai(call, kind))

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
            self.admission.check_room()
        except LmiError as refusal:
            self.admission.error_rates.record(refusal)
            raise

    async def _until_shutdown(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Return the reply; a shutdown that cuts it off is an error with an answer."""
        if (record := current_record()) is not None:
            record.is_inference = True
        rates = self.admission.error_rates
        try:
            reply = await work
        except asyncio.CancelledError:
            error = self.admission.shutdown_error()
            if error is None:
                raise
            raise error from None
        except LmiError as raised:
            rates.record(raised)
            raise
        rates.record_status(reply.status)
        return reply

    async def _infer(self, call: InferenceCall) -> Reply:
        runtime = self.runtime
        async with RequestHold() as resources:
            resources.enter_context(self.admission.admit())
            reply = await runtime.code.handle(call, request_content(call))
            if reply is None:
                await self.sessions.check(call.properties)
                payload = decode_payload(runtime.code, runtime.adapters, call)
                payload = with_adapter_id(payload, runtime.profile)
                reply = await self._answer(runtime, call, payload, resources)
            return _held(reply, resources)

    async def _answer(
        self, runtime: Runtime, call: InferenceCall, payload: Any, resources: RequestHold
    ) -> Reply:
        """Answer a decoded payload, its adapter's hooks around it."""
        code, adapters = runtime.code, runtime.adapters
        names = differing_adapters(call, payload, adapters)
        if names and await has_hooks(code, adapters, call, names, resources):
            return await self._answer_each(runtime, call, payload, names, resources)
        hooks, name = NO_HOOKS, None
        if not names:
            hooks, name = await select_hooks(code, adapters, call, payload, resources)
        payload = await apply_input_hook(code, hooks, call, payload, name)
        if runtime.profile.task == GENERATE and is_session_request(payload):
            return await self.sessions.answer(payload, call.properties)
        if hooks.output is not None:
            kind, body = openai_request(runtime.profile, adapters, call, payload)
            answer = await self._openai(runtime, call, kind, body, resources)
            return await formatted(code, hooks.output, call, payload, answer)
        if runtime.profile.task != GENERATE:
            return await self._pool(runtime, call, payload, resources)
        family = Family.GENERATION if call.tgi_route else dispatch(payload)
        if family is Family.GENERATION:
            return await self._generate(runtime, call, payload, resources)
        if (record := current_record()) is not None:
            record.dialect = str(RouteFamily.OPENAI)
        profile = runtime.profile
        dialect = OpenAIDialect(lmi_family(profile), self._framing(call, profile))
        answer = await self._openai(runtime, call, family, payload, resources, dialect)
        return lmi_reply(answer, dialect.framing.content_type)

    async def _answer_each(
        self,
        runtime: Runtime,
        call: InferenceCall,
        payload: dict[str, Any],
        names: list[str | None],
        resources: RequestHold,
    ) -> Reply:
        """Answer each prompt of a list as a request of its own: their adapters' hooks differ."""
        self._admit_list("inputs", len(names), resources)
        parts = enumerate(zip(payload["inputs"], names, strict=True))
        works = [
            self._answer(
                runtime,
                replace(call, request_id=f"{call.request_id}-{position}"),
                {**payload, "inputs": prompt, "adapters": name or ""},
                resources,
            )
            for position, (prompt, name) in parts
        ]
        replies = await gathered(works)
        if any(reply.stream is not None for reply in replies):
            raise PayloadError("inputs: streaming takes one prompt, not a list")
        bodies = [reply.body for reply in replies]
        return Reply(200, FRAMINGS["json"].content_type, joined(bodies))

    async def _pool(
        self,
        runtime: Runtime,
        call: InferenceCall,
        payload: dict[str, Any],
        resources: RequestHold,
    ) -> Reply:
        """Answer on a model that embeds, classifies or ranks."""
        request = parse_pooling_request(payload, runtime.profile, runtime.adapters.__contains__)
        answer = await self._openai(runtime, call, request.kind, request.body, resources)
        if request.is_vectors and answer.status == 200:  # noqa: PLR2004 (success)
            return vectors_reply(answer)
        return lmi_reply(answer)

    async def _answer_openai(self, call: InferenceCall, kind: str) -> Reply:
        runtime = self.runtime
        async with RequestHold() as resources:
            if kind == "models":
                answer = await runtime.engine.answer_openai(
                    OpenAICall("models", {}, call.properties, call.request_id)
                )
                listed = with_adapters(answer.body, runtime.adapters)
                return Reply(answer.status, answer.content_type, listed)
            resources.enter_context(self.admission.admit())
            code, is_hooked = runtime.code, kind not in UNHOOKED_KINDS
            if is_hooked and (own := await code.handle(call, request_content(call))) is not None:
                return _held(own, resources)
            payload: Any = decode_body(call.body, "application/json")
            if kind == "tokenize" and tgi.is_tokenize_request(payload, runtime.profile):
                tokens = await tgi.tokenize(payload, runtime.engine)
                return Reply(200, "application/json", orjson.dumps(tokens))
            hooks, name = await select_hooks(code, runtime.adapters, call, payload, resources)
            hooks = hooks if is_hooked else NO_HOOKS
            payload = await apply_input_hook(code, hooks, call, payload, name)
            answer = await self._openai(runtime, call, kind, payload, resources)
            reply = Reply(
                answer.status, answer.content_type, answer.body, answer.stream, answer.headers
            )
            if hooks.output is not None and answer.status == 200:  # noqa: PLR2004 (success)
                reply = await code.format_output(hooks.output, call, payload, answer)
            return _held(reply, resources)

    async def _openai(
        self,
        runtime: Runtime,
        call: InferenceCall,
        kind: str,
        payload: Mapping[str, Any],
        resources: RequestHold,
        dialect: OpenAIDialect = V1_DIALECT,
    ) -> OpenAIReply:
        check_limits(payload, runtime.profile.limits)
        if kind != "responses":  # its list of inputs is one conversation
            self._admit_list("prompts", sequence_count(payload), resources)
        name = adapter_name(call, payload, runtime.adapters.__contains__)
        body = {key: value for key, value in payload.items() if key != "adapters"}
        ref = await self._hold_adapter(runtime, call, name, resources)
        if ref is not None:
            body["model"] = ref.name
        seconds = runtime.profile.predict_timeout
        try:
            async with asyncio.timeout(seconds):
                answer = await runtime.engine.answer_openai(
                    OpenAICall(kind, body, call.properties, call.request_id, adapter=ref)
                )
        except TimeoutError:
            raise deadline_error(seconds, "predict_timeout") from None
        if answer.stream is not None:
            resources.push_async_callback(close_iterator, answer.stream)
            events = dialect.events(answer.stream)
            ends = StreamEnds(self.admission, runtime.profile)
            return replace(answer, stream=ends.events(events, dialect))
        return answer

    async def _generate(
        self,
        runtime: Runtime,
        call: InferenceCall,
        payload: Mapping[str, Any],
        resources: RequestHold,
    ) -> Reply:
        request = parse_lmi_request(payload, runtime.profile, call.tgi_route)
        self._unread_names.warn(request.unread)
        if request.is_list:
            sequences = len(request.prompts) * request.candidates.generated
            self._admit_list("inputs", sequences, resources)
        self._check_length(runtime, request)
        is_adapter = runtime.adapters.__contains__
        if request.is_list:
            names = adapter_names(call, payload, len(request.prompts), is_adapter)
        else:
            names = [adapter_name(call, payload, is_adapter)]
        refs = [await self._hold_adapter(runtime, call, name, resources) for name in names]
        jobs = [
            make_job(request, call.request_id, position, ref) for position, ref in enumerate(refs)
        ]
        schema = choose_schema(runtime.profile, call.tgi_route)
        if request.is_streaming:
            return await self._stream(runtime, call, request, jobs[0], schema, resources)
        seconds = runtime.profile.predict_timeout
        try:
            async with asyncio.timeout(seconds):
                results = await gather_results(runtime.engine, request, jobs, schema)
        except TimeoutError:
            raise deadline_error(seconds, "predict_timeout") from None
        body = encode_results(results, is_list=request.is_list, schema=schema)
        return Reply(200, FRAMINGS["json"].content_type, body)

    async def _stream(
        self,
        runtime: Runtime,
        call: InferenceCall,
        request: LmiRequest,
        job: GenerationJob,
        schema: Schema,
        resources: RequestHold,
    ) -> Reply:
        profile = runtime.profile
        framing = self._framing(call, profile)
        formatter = StreamFormatter(request, request.prompts[0], schema, framing)
        limit = SilenceLimit(profile.predict_timeout, "predict_timeout")
        resources.callback(limit.close)
        direct = DirectRows(formatter, limit)
        chunks = runtime.engine.generate(job, direct)
        resources.push_async_callback(close_iterator, chunks)  # also when nothing reads it
        # The status line waits for the first chunk: what fails before it gets a status of its own.
        first = await limit.next(chunks)
        rows = StreamEnds(self.admission, profile).rows(first, chunks, direct)
        return Reply(200, framing.content_type, stream=DirectStream(rows, direct.connect))

    def _framing(self, call: InferenceCall, profile: ServingProfile) -> Framing:
        default = None if call.tgi_route else profile.output_formatter
        return choose_framing(call.accept, default, tgi_compat=profile.tgi_compat)

    def _admit_list(self, name: str, sequences: int, resources: RequestHold) -> None:
        """Take the further places of a list: each sequence it asks for counts as a request."""
        if sequences > self.admission.limit:
            raise PayloadError(
                f"{name}: {sequences} sequences; job_queue_size allows {self.admission.limit}"
            )
        if sequences > 1:
            resources.enter_context(self.admission.admit(sequences - 1))

    def _check_length(self, runtime: Runtime, request: LmiRequest) -> None:
        wanted = request.sampling["max_tokens"]
        if isinstance(wanted, int) and wanted > runtime.engine.max_model_len:
            raise PayloadError(
                f"parameters.max_new_tokens: {wanted} is more than max_model_len "
                f"({runtime.engine.max_model_len})"
            )

    async def _hold_adapter(
        self,
        runtime: Runtime,
        call: InferenceCall,
        name: str | None,
        resources: RequestHold,
    ) -> AdapterRef | None:
        alias = call.properties.get(ADAPTER_ALIAS_HEADER)
        ref = (await resources.lease(runtime.adapters, name, alias)).ref
        if ref is not None and (record := current_record()) is not None:
            record.use_adapter(ref.name)
        return ref


def _held(reply: Reply, resources: RequestHold) -> Reply:
    """Move what the request holds into its stream; without one it is released on return."""
    if reply.stream is None:
        return reply
    return replace(reply, stream=HeldStream(reply.stream, resources.pop_all()))
