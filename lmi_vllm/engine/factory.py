"""How an engine comes to be: the protocol of each kind's factory, and imports that do not pause.

A full collection over the 600,000 objects that vLLM and torch import, all of which stay, stops the
event loop for 0.3 to 0.4 s, and with it every stream and every refusal; collections while they are
imported cost a fifth of the import (DECISIONS.md 42).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import EngineArguments, EngineSeat, ServingProfile


class EngineFactory(Protocol):
    """Makes engines of one kind, one after the other: the next one when the last has failed."""

    def kind(self, arguments: EngineArguments) -> str:
        """Return the name of the engine that runs this model, as far as it is known."""
        ...

    @property
    def reads_model(self) -> bool:
        """Whether its engines need the files of the model on the disk."""
        ...

    async def load(self, arguments: EngineArguments) -> None:
        """Import what the engine needs and check its arguments, while the model is fetched.

        Raises:
            ConfigurationError: it refuses an argument.
            EngineStartError: it cannot be imported.
        """
        ...

    async def start(
        self,
        arguments: EngineArguments,
        profile: ServingProfile,
        seats: tuple[EngineSeat, ...] = (),
    ) -> Engine:
        """Return a running engine; other processes may take `seats` at it.

        Raises:
            ConfigurationError: it refuses an argument.
            EngineStartError: it did not come up.
        """
        ...

    def abandon(self) -> None:
        """End every process of a start that is not waited for any longer."""
        ...


@contextmanager
def imports_without_collections() -> Iterator[None]:
    """Import in this block: the collector rests, and ignores for good what was made meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Call when a model is ready: what there is now is not looked at again while it serves."""
    gc.collect()
    gc.freeze()


def settle_again() -> None:
    """As `settle`, for another engine; the sockets and threads of the old one are in cycles."""
    gc.unfreeze()
    settle()
