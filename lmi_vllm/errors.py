"""Every error this project raises, and what each one means to a client.

    LmiError
    ├── StartupError                 the process ends with exit code 1, the text printed last
    │   ├── ConfigurationError       one or more settings are wrong; all of them are listed
    │   ├── ModelSourceError         a model that cannot be served
    │   │   └── NoModelError         no model is named or found
    │   ├── DownloadError            a model or an adapter could not be fetched
    │   │   ├── MissingRepositoryError  there is none of that name, or it is private
    │   │   └── TooManyObjectsError  its store lists more objects than are asked for
    │   └── EngineStartError         vLLM refused to start
    │       └── EngineMemoryError    for lack of memory
    ├── RequestError                 the client's payload caused it (424 on LMI routes)
    │   ├── PayloadError             a field is missing, of the wrong type or out of range
    │   ├── UnknownAdapterError      the request names an adapter that is not registered
    │   └── NoAdapterSlotError       every slot is pinned, by other adapters; carries Retry-After
    ├── CustomCodeError              a hook of the user's failed on a request (424 on LMI routes)
    │   └── CustomCodeMemoryError    for lack of memory (507)
    ├── ManagementError              a management call cannot be carried out
    │   ├── BadParameterError        400
    │   ├── ResourceNotFoundError    404
    │   ├── MethodNotAllowedError    405
    │   ├── ExpectationError         417
    │   ├── AdapterConflictError     409
    │   └── AdapterRefusedError      424
    │       ├── AdapterMissingError  its source does not exist
    │       └── AdapterCapacityError 507: no slot or memory is left; carries Retry-After
    ├── UnauthorizedError            401
    ├── CrossSiteError               403: a page of another site asks
    ├── PayloadTooLargeError         413
    ├── SlowBodyError                408
    ├── OverloadError                the in-flight limit is reached; carries Retry-After
    ├── NotReadyError                starting, restarting or draining; carries Retry-After
    ├── DeadlineError                a time limit of ours expired
    └── EngineFailureError           the engine answered with a fault of its own
        └── EngineDeadError          the engine process is gone

Each class owns its fault; which status a fault becomes in which dialect is decided by one table,
`StatusTable`, for answers and for the last rows of streams. Statuses are plain integers: this
module imports no web framework.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final, Self

from lmi_vllm.masked_urls import MOST_SHOWN, shown


class Fault(StrEnum):
    """Who caused an error: its name, its status, and LMI's and vLLM's `type` of it.

    In some dialects the status differs, and settings change it. Use a `StatusTable` to read it.
    """

    status: int
    kind: str
    openai_type: str

    def __new__(
        cls, name: str, status: int, kind: str, openai_type: str = "InternalServerError"
    ) -> Self:
        """Return the member of that name."""
        fault = str.__new__(cls, name)
        fault._value_, fault.status, fault.kind, fault.openai_type = name, status, kind, openai_type
        return fault

    CLIENT = "client", 424, "BadRequestException", "BadRequestError"
    CUSTOM_CODE = "custom_code", 424, "BadRequestException"
    NOT_FOUND = "not_found", 404, "ResourceNotFoundException", "NotFoundError"
    BAD_PARAMETER = "bad_parameter", 400, "BadRequestException", "BadRequestError"
    UNAUTHORIZED = "unauthorized", 401, "UnauthorizedException", "AuthenticationError"
    FORBIDDEN = "forbidden", 403, "ForbiddenException", "PermissionDeniedError"
    METHOD = "method", 405, "MethodNotAllowedException", "MethodNotAllowedError"
    EXPECTATION = "expectation", 417, "ExpectationFailedException", "BadRequestError"
    CONFLICT = "conflict", 409, "ConflictException"
    TOO_LARGE = "too_large", 413, "PayloadTooLargeException", "BadRequestError"
    SLOW = "slow", 408, "RequestTimeoutException", "RequestTimeoutError"
    MEMORY = "memory", 507, "InsufficientMemoryException"
    OVERLOAD = "overload", 503, "WlmCapacityException", "ServiceUnavailableError"
    NOT_READY = "not_ready", 503, "ServiceUnavailableException", "ServiceUnavailableError"
    DEADLINE = "deadline", 500, "TimeoutException"
    ENGINE = "engine", 500, "InternalServerException"


class Dialect(StrEnum):
    """The dialect in which a route answers and refuses."""

    SERVER = "server"
    LMI = "lmi"
    OPENAI = "openai"
    TGI = "tgi"
    ANTHROPIC = "anthropic"
    COHERE = "cohere"
    KSERVE = "kserve"


class LmiError(Exception):
    """Base of all our errors; its text is for the person who caused the error."""

    fault: ClassVar[Fault] = Fault.ENGINE
    most_shown: ClassVar[int] = MOST_SHOWN

    @property
    def kind(self) -> str:
        """LMI's `type` of the error: that of its fault."""
        return self.fault.kind

    @property
    def text(self) -> str:
        """The text for the client or the operator: no secrets in URLs, no field of megabytes."""
        return shown(str(self), self.most_shown)

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling between processes: constructors here take other arguments than texts."""
        return _restored, (type(self), self.args, dict(self.__dict__))


def _restored(
    kind: type[LmiError], arguments: tuple[object, ...], state: Mapping[str, object]
) -> LmiError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class StartupError(LmiError):
    """The server cannot start."""

    most_shown = 8 * MOST_SHOWN  # all problems of a configuration


class ConfigurationError(StartupError):
    """One or more settings are wrong; `problems` holds one sentence for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class ModelSourceError(StartupError):
    """No model was found, or it cannot be served."""


class NoModelError(ModelSourceError):
    """No model is named, and the store has none."""


class DownloadError(StartupError):
    """A model or adapter could not be fetched; the text has the source and the reason."""


class MissingRepositoryError(DownloadError):
    """The hub has no repository of that name, or it is private."""


class TooManyObjectsError(DownloadError):
    """There are more objects below a URL than were asked for."""


class EngineStartError(StartupError):
    """The engine did not start; the text has the root cause."""


class EngineMemoryError(EngineStartError):
    """There is not enough memory for the model."""


class RequestError(LmiError):
    """The request's own content is wrong."""

    fault = Fault.CLIENT


class PayloadError(RequestError):
    """A field of the payload is missing, of the wrong type or out of range."""


class UnknownAdapterError(RequestError):
    """A request names an adapter that is not registered; it never falls back to the base model."""

    kind = "NotFoundError"

    def __init__(self, adapter: str) -> None:
        super().__init__(f"The adapter {adapter} was not found in the registry of loaded adapters")


class NoAdapterSlotError(RequestError):
    """No adapter slot is left for the adapter of a request."""

    retry_after_seconds = 5


class CustomCodeError(LmiError):
    """A handler or formatter of the user failed on a request."""

    fault = Fault.CUSTOM_CODE


class CustomCodeMemoryError(CustomCodeError):
    """A handler or formatter of the user found no memory."""

    fault = Fault.MEMORY


class ManagementError(LmiError):
    """A management call cannot be carried out."""


class BadParameterError(ManagementError):
    """A query or body parameter is missing or wrong."""

    fault = Fault.BAD_PARAMETER


class ResourceNotFoundError(ManagementError):
    """The named object, or the path, does not exist; `kind` is LMI's word for it."""

    fault = Fault.NOT_FOUND
    kind: str = Fault.NOT_FOUND.kind

    def __init__(
        self,
        text: str = "Requested resource is not found, please refer to API document.",
        kind: str = Fault.NOT_FOUND.kind,
    ) -> None:
        super().__init__(text)
        self.kind = kind


class MethodNotAllowedError(ManagementError):
    """The path exists, but not with this method; `allowed` are its methods."""

    fault = Fault.METHOD

    def __init__(
        self,
        text: str = "Requested method is not allowed, please refer to API document.",
        allowed: Sequence[str] = (),
    ) -> None:
        super().__init__(text)
        self.allowed = tuple(allowed)


class ExpectationError(ManagementError):
    """The `Expect` header has another value than 100-continue."""

    fault = Fault.EXPECTATION


class AdapterConflictError(ManagementError):
    """The adapter name is taken, or its source is never loaded."""

    fault = Fault.CONFLICT


class AdapterRefusedError(ManagementError):
    """An adapter was refused; the text has the adapter and the reason."""

    fault = Fault.CLIENT


class AdapterMissingError(AdapterRefusedError):
    """The source of an adapter does not exist."""


class AdapterCapacityError(AdapterRefusedError):
    """No slot or memory is left for a pinned or preloaded adapter."""

    fault = Fault.MEMORY
    retry_after_seconds = 5


class UnauthorizedError(LmiError):
    """The server has API keys and the request has none of them."""

    fault = Fault.UNAUTHORIZED

    def __init__(
        self,
        text: str = "A valid API key is required: Authorization: Bearer <key>, or x-api-key: <key>",
    ) -> None:
        super().__init__(text)


class CrossSiteError(LmiError):
    """A browser sends the request for a page of another site."""

    fault = Fault.FORBIDDEN


class PayloadTooLargeError(LmiError):
    """The body is larger than `max_request_size`."""

    fault = Fault.TOO_LARGE


class SlowBodyError(LmiError, TimeoutError):
    """The body did not arrive in time; a TimeoutError, because aiohttp may be reading it."""

    fault = Fault.SLOW


class OverloadError(LmiError):
    """The in-flight limit is reached."""

    fault = Fault.OVERLOAD
    retry_after_seconds = 1

    def __init__(self, model: str) -> None:
        super().__init__(f"Worker queue capacity exceeded for model: {model}")


class NotReadyError(LmiError):
    """The server is starting, restarting its engine, or draining."""

    fault = Fault.NOT_READY

    def __init__(self, text: str, retry_after_seconds: int = 5) -> None:
        super().__init__(text)
        self.retry_after_seconds = retry_after_seconds


class DeadlineError(LmiError):
    """A time limit of the server expired; the text names the setting."""

    fault = Fault.DEADLINE


class EngineFailureError(LmiError):
    """The engine failed on a request, not because of the client."""


class EngineDeadError(EngineFailureError):
    """The engine process has ended; every request in flight ends with this error."""

    def __init__(self, text: str = "Inference Engine Failure") -> None:
        super().__init__(text)


# Dialects with the statuses of vLLM.
_VLLMS: Final = (Dialect.OPENAI, Dialect.ANTHROPIC, Dialect.COHERE, Dialect.KSERVE)
# The statuses of dialects in which they differ.
_DIALECT_STATUS: Final[Mapping[Dialect, Mapping[Fault, int]]] = MappingProxyType(
    {
        Dialect.TGI: MappingProxyType({Fault.CLIENT: 422, Fault.OVERLOAD: 429}),
        **dict.fromkeys(_VLLMS, MappingProxyType({Fault.CLIENT: 400, Fault.CUSTOM_CODE: 500})),
    }
)
# TGI's `error_type` by status (its router's error module); below 500 the others are "validation".
TGI_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {424: "generation", 429: "overloaded", 500: "incomplete_generation", 503: "unhealthy"}
)


class StatusTable:
    """The HTTP status of every fault in every dialect; settings can change LMI's own.

    vLLM's and TGI's clients expect the codes of those servers, so settings do not change them.
    """

    def __init__(self, configured: Mapping[Fault, int] | None = None) -> None:
        usual, own = {fault: fault.status for fault in Fault}, configured or {}
        differing = {Dialect.SERVER: own, Dialect.LMI: own, **_DIALECT_STATUS}
        self._statuses = {dialect: usual | {**other} for dialect, other in differing.items()}

    def of_fault(self, fault: Fault, dialect: Dialect) -> int:
        """Return the status of most errors with this fault."""
        return self._statuses[dialect][fault]

    def of(self, error: LmiError, dialect: Dialect) -> int:
        """Return the status of `error`, as an answer or in the last row of a stream."""
        if dialect in _VLLMS and isinstance(error, UnknownAdapterError):
            return 404  # vLLM's own code for a model it does not serve
        if isinstance(error, NoAdapterSlotError) and dialect in _DIALECT_STATUS:
            return self.of_fault(Fault.OVERLOAD, dialect)  # a router asks another server
        if (
            dialect is Dialect.TGI
            and isinstance(error, EngineFailureError)
            and not isinstance(error, EngineDeadError)
        ):
            return 424  # one request failed in the engine, which goes on
        return self.of_fault(error.fault, dialect)


DEFAULT_STATUSES: Final = StatusTable()


def tgi_error(text: str, status: int) -> dict[str, str]:
    """TGI's text of an error, as a body or as the last event of its stream."""
    return {"error": text, "error_type": TGI_TYPES.get(status, "validation")}


def openai_error(error: LmiError, text: str, status: int) -> dict[str, object]:
    """The error of vLLM's OpenAI routes, as a body or as an event."""
    return {
        "error": {"message": text, "type": _vllm_type(error, status), "param": None, "code": status}
    }


def anthropic_error(error: LmiError, text: str, status: int) -> dict[str, object]:
    """The error of vLLM's Anthropic routes, as a body or as an event."""
    return {"type": "error", "error": {"type": _vllm_type(error, status), "message": text}}


def _vllm_type(error: LmiError, status: int) -> str:
    if isinstance(error, NoAdapterSlotError):
        return Fault.OVERLOAD.openai_type
    return (Fault.NOT_FOUND if status == Fault.NOT_FOUND.status else error.fault).openai_type
