"""Calls of user code: on its thread, within its time limit, with LMI's `Input`."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.errors import (
    CustomCodeError,
    CustomCodeMemoryError,
    Dialect,
    LmiError,
    StatusTable,
)
from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.thread import CodeThread
from lmi_vllm.inference.response.formatters import frame, lmi_error
from lmi_vllm.inference.response.streams import Deadline
from lmi_vllm.messages import FRAMINGS, InferenceCall

logger = logging.getLogger(__name__)

_NO_MEMORY: Final = ("MemoryError", "OutOfMemoryError")  # Python's and torch's, as in LMI


@dataclass(frozen=True, slots=True)
class CodeCaller:
    """Calls the custom code of one model and of its adapters.

    `properties` are the model's options, which a handler finds among the request's properties.
    `tokenizer` is the hooks' own copy.
    """

    thread: CodeThread = field(default_factory=CodeThread)
    tokenizer: object = None
    properties: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    timeout_seconds: float = 240.0

    async def call(self, failed: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns; `failed` begins the message of its failure.

        Raises:
            CustomCodeError: the function raised an exception.
            DeadlineError: it ran longer than `timeout_seconds`.
        """
        async with Deadline(self.timeout_seconds, "predict_timeout"):
            try:
                return await self.thread.run(function, *arguments)
            except Exception as error:
                raise failure(failed, error) from error

    def input(self, call: InferenceCall, content: Iterable[tuple[str, bytes]] = ()) -> Input:
        """Return a request as the `Input` that LMI's handlers get, with this content."""
        given = Input()
        given.properties = {**self.properties, **call.properties}
        if call.content_type:
            given.properties["Content-Type"] = call.content_type
        for key, value in content:
            given.content.add(key, value)
        return given


def failure(what: str, error: Exception) -> CustomCodeError:
    """Return the error for the client; the traceback goes to the log."""
    logger.error("%s", what, exc_info=error)
    kind = CustomCodeMemoryError if type(error).__name__ in _NO_MEMORY else CustomCodeError
    return kind(f"{what}: {str(error) or type(error).__name__}")


def error_row(error: LmiError, statuses: StatusTable) -> bytes:
    """Return the last row of a failed stream, in LMI's format."""
    return frame(FRAMINGS["jsonlines"], lmi_error(error.text, statuses.of(error, Dialect.LMI)))
