"""The protocols of users' code: an input hook, a handler and an output hook.

The custom_code feature finds, loads and calls users' code. Without it there are no hooks.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lmi_vllm.errors import StatusTable
from lmi_vllm.messages import GenerationChunk, InferenceCall, OpenAIReply, Reply

# Answers a request instead of the built-in handler; None leaves the request to that one.
Handle = Callable[[InferenceCall, StatusTable], Awaitable[Reply | None]]


class InputHook(Protocol):
    """Turns a request's payload into another payload."""

    def undecoded(self, call: InferenceCall) -> Any:
        """Return the payload of a body that only a hook can read.

        Raises:
            PayloadError: the hook could not read it either.
        """
        ...

    async def __call__(self, call: InferenceCall, payload: Any) -> dict[str, Any]:
        """Return the new payload.

        Raises:
            CustomCodeError: the hook failed.
        """
        ...


class OutputHook(Protocol):
    """Turns vLLM's response into the answer."""

    async def __call__(
        self, call: InferenceCall, payload: Any, answer: OpenAIReply, statuses: StatusTable
    ) -> Reply:
        """Return the answer to the client.

        Raises:
            CustomCodeError: the hook failed.
        """
        ...


class TokenHook(Protocol):
    """Writes the answers to `inputs` itself, token by token; other requests do without it."""

    async def whole(
        self,
        call: InferenceCall,
        payload: Mapping[str, Any],
        prompt: str,
        sequences: Sequence[GenerationChunk],
    ) -> bytes:
        """Return the body for one prompt; `sequences` are its candidates, best first.

        Raises:
            CustomCodeError: the hook failed.
        """
        ...

    def rows(
        self,
        call: InferenceCall,
        payload: Mapping[str, Any],
        prompt: str,
        chunks: AsyncIterator[GenerationChunk],
    ) -> AsyncIterator[bytes]:
        """Yield what the hook writes for each chunk of a stream; nothing is left out.

        Raises:
            CustomCodeError: the hook failed.
        """
        ...


def nothing() -> None:
    """Release nothing."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The functions of one file, ready to be called; None for a missing one."""

    handle: Handle | None = None
    input: InputHook | None = None
    output: OutputHook | None = None
    forget: Callable[[], None] = nothing  # removes the file's modules
    tokens: TokenHook | None = None  # in the place of `output`

    @property
    def are_some(self) -> bool:
        """Whether there is a function that sees requests."""
        return bool(self.handle) or self.changes_requests

    @property
    def changes_requests(self) -> bool:
        """Whether there is one beside the handler."""
        return bool(self.input or self.output or self.tokens)

    def over(self, base: "Hooks") -> "Hooks":
        """Return these hooks, with those of `base` for missing ones; the handler is the base's."""
        out = self if self.output or self.tokens else base
        return Hooks(base.handle, self.input or base.input, out.output, tokens=out.tokens)


NO_HOOKS: Final = Hooks()
