"""The hooks of a file: which functions there are, their arguments and their results."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import orjson

from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.djl_python.request import legacy_arguments, takes_request_output
from lmi_vllm.hooks import nothing

_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
# Methods by which objects serialize themselves, tried in this order; the first is pydantic's.
_JSON_DUMPS: Final = ("model_dump_json", "to_json", "json")


class HookError(Exception):
    """A hook has a signature that cannot be called, or returned an unusable value."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """The context that a hook can take as argument; `request` is the payload."""

    request: Any
    tokenizer: Any = None
    body: bytes = b""
    content_type: str = ""
    accept: str = ""
    input: Input | None = None


@dataclass(frozen=True, slots=True)
class InputFunction:
    """A function that turns a decoded payload into another."""

    function: Callable[..., Any]
    names: frozenset[str] = frozenset()  # parameters passed by keyword
    wants_input: bool = False  # the older style: an Input instead of the payload
    is_sagemaker: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], *, is_sagemaker: bool = False) -> "InputFunction":
        """Return the hook for a function.

        Raises:
            HookError: it requires arguments that hooks are not given.
        """
        if is_sagemaker:
            return cls(function, is_sagemaker=True)
        parameters = parameters_of(function)
        names = check_input_parameters(_name(function), parameters)
        wants_input = any(item.annotation in (Input, "Input") for item in (parameters or ())[:1])
        return cls(function, names, wants_input)

    def call(self, context: HookContext) -> Any:
        """Return what the function makes of the request; a coroutine where it is async."""
        if self.is_sagemaker:
            return self.function(context.body, context.content_type)
        known = {"tokenizer": context.tokenizer}
        arguments = {name: known[name] for name in self.names}
        return self.function(context.input if self.wants_input else context.request, **arguments)


@dataclass(frozen=True, slots=True)
class OutputFunction:
    """A function that makes the final body out of vLLM's response, or of one of its events."""

    function: Callable[..., Any]
    names: frozenset[str] = frozenset()
    takes_request: bool = False  # a second positional argument
    is_sagemaker: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], *, is_sagemaker: bool = False) -> "OutputFunction":
        """Return the hook for a function.

        Raises:
            HookError: it requires arguments that hooks are not given.
        """
        if is_sagemaker:
            return cls(function, is_sagemaker=True)
        names, extra = check_output_parameters(_name(function), parameters_of(function))
        return cls(function, names, takes_request=bool(extra))

    def call(self, response: Any, context: HookContext) -> Any:
        """Return what the function makes of the response; a coroutine where it is async."""
        if self.is_sagemaker:
            return self.function(response, context.accept or "application/json")
        request = context.request if isinstance(context.request, dict) else {}
        known = {
            "tokenizer": context.tokenizer,
            "request": request,
            "parameters": request.get("parameters") or {},
        }
        arguments = {name: known[name] for name in self.names}
        if self.takes_request:
            return self.function(response, request, **arguments)
        return self.function(response, **arguments)


@dataclass(frozen=True, slots=True)
class TokenFunction:
    """An output formatter of LMI's rolling batch, which is called for each token.

    `values_of_next` is the number of values that its file unpacks from `get_next_token()`.
    """

    function: Callable[..., Any]
    values_of_next: int = 3

    @classmethod
    def of(cls, function: Callable[..., Any], values_of_next: int) -> Self | None:
        """Return the hook for a function with one of the two signatures; None for another."""
        if not is_for_tokens(parameters_of(function) or []):
            return None
        return cls(function, values_of_next)


@dataclass(frozen=True, slots=True)
class AdapterFunctions:
    """What a file with a handler of its own does about adapters."""

    register: Callable[..., Any] | None = None
    unregister: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class FileFunctions:
    """The hooks that one file defines; None where it has none."""

    handle: Callable[..., Any] | None = None
    input: InputFunction | None = None
    output: OutputFunction | None = None
    forget: Callable[[], None] = nothing  # removes the file's modules
    tokens: TokenFunction | None = None  # in the place of `output`
    adapters: AdapterFunctions = AdapterFunctions()

    def __bool__(self) -> bool:
        return bool(self.handle or self.input or self.output or self.tokens)


NO_FUNCTIONS: Final = FileFunctions()


def new_payload(result: Any) -> dict[str, Any]:
    """Return the payload an input hook made; the older API's TextInput counts as one.

    Raises:
        HookError: it is neither a dict nor a TextInput.
    """
    if isinstance(result, dict):
        return result
    if hasattr(result, "input_text"):
        payload = {"inputs": result.input_text, "parameters": dict(result.parameters or {})}
        if getattr(result, "adapters", None):
            payload["adapters"] = result.adapters
        return payload
    raise HookError(f"the input formatter returned {_kind(result)}, expected a dict")


def new_body(result: Any) -> bytes:
    """Return an output hook's result as bytes: text and bytes as they are, anything else as JSON.

    Raises:
        HookError: JSON cannot hold it.
    """
    if isinstance(result, str):
        return result.encode()
    if isinstance(result, (bytes, bytearray)):
        return bytes(result)
    for name in _JSON_DUMPS:
        if callable(dump := getattr(result, name, None)):
            return new_body(dump())
    if callable(dump := getattr(result, "model_dump", None)):
        result = dump()
    try:
        return orjson.dumps(result, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise HookError(f"the output formatter returned {_kind(result)}: {error}") from error


def _plain(value: Any) -> Any:
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if callable(to_list := getattr(value, "tolist", None)):  # numpy
        return to_list()
    raise TypeError(f"{_kind(value)} cannot be written as JSON")


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return a function's parameters; None for a builtin that does not say them."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def is_for_tokens(parameters: list[inspect.Parameter]) -> bool:
    """Return whether an output formatter has a signature of LMI's rolling batch."""
    return takes_request_output(parameters) or bool(legacy_arguments(parameters))


def check_input_parameters(name: str, parameters: list[inspect.Parameter] | None) -> frozenset[str]:
    """Return which arguments an input formatter takes by keyword.

    Raises:
        HookError: it requires arguments that it is not given.
    """
    names, extra = _arguments(name, parameters, frozenset({"tokenizer"}))
    if extra:
        raise HookError(
            f"the input formatter {name} needs {extra}; it is called with the payload and tokenizer"
        )
    return names


def check_output_parameters(
    name: str, parameters: list[inspect.Parameter] | None
) -> tuple[frozenset[str], list[str]]:
    """Return which arguments an output formatter takes by keyword, and its second one.

    Raises:
        HookError: it requires arguments that it is not given.
    """
    names, extra = _arguments(name, parameters, frozenset({"tokenizer", "request", "parameters"}))
    if len(extra) > 1:
        raise HookError(
            f"the output formatter {name} needs {extra}; it is called with the response, and if it "
            "takes a second argument with the request. LMI's older signatures work, too: (token, "
            "first_token, last_token, details, generated_tokens, request_id), and one argument "
            "annotated as TextGenerationOutput"
        )
    return names, extra


def _arguments(
    name: str, parameters: list[inspect.Parameter] | None, known: frozenset[str]
) -> tuple[frozenset[str], list[str]]:
    """Return the known parameters that are passed by keyword, and the unknown required ones."""
    if parameters is None:  # a builtin: called with the positional arguments
        return frozenset(), []
    if not parameters:
        raise HookError(f"{name} takes no argument")
    rest = parameters[1:]
    takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)
    by_keyword = {item.name for item in rest if item.name in known and item.kind != _POSITIONAL[0]}
    names = known if takes_any else frozenset(by_keyword)
    extra = [
        item.name
        for item in rest
        if item.default is inspect.Parameter.empty
        and item.name not in names
        and item.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    ]
    return names, extra


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _kind(value: Any) -> str:
    return type(value).__name__
