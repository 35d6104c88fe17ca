"""The protocol of engine factories, and control of the garbage collector during imports.

vLLM and torch import 600,000 objects that stay. A full collection over them stops the event loop
for 0.3 to 0.4 s, and with it every stream and every refusal. Collections during the import take a
fifth of its time (DECISIONS.md 42).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from lmi_vllm.engine.base import Engine, EngineClient
from lmi_vllm.messages import EngineArguments, ServingProfile

# How many more objects than were freed are made until cycles among them are looked for. With
# Python's 700 that takes about 5 % of a short request's CPU time (docs/performance/README.md).
COLLECT_AFTER: Final = 20_000


class EngineFactory(Protocol):
    """Makes engines of one kind, one after the other: the next when the last has failed."""

    def kind(self, arguments: EngineArguments) -> str:
        """Return the name of the engine that runs this model, as far as that is known."""
        ...

    @property
    def reads_model(self) -> bool:
        """Whether its engines need the model's files on the disk."""
        ...

    async def load(self, arguments: EngineArguments) -> None:
        """Import the engine's libraries and check its arguments, while the model is fetched.

        Raises:
            ConfigurationError: it refuses an argument.
            EngineStartError: it cannot be imported.
        """
        ...

    async def start(
        self,
        arguments: EngineArguments,
        profile: ServingProfile,
        clients: tuple[EngineClient, ...] = (),
    ) -> Engine:
        """Return a running engine; other processes may join it as these `clients`.

        Raises:
            ConfigurationError: it refuses an argument.
            EngineStartError: it did not come up.
        """
        ...

    def abandon(self) -> None:
        """End all processes of a start that was cancelled."""
        ...


@contextmanager
def imports_without_collections() -> Iterator[None]:
    """Disable the garbage collector during imports, and freeze the objects that they make."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_heap() -> None:
    """Collect, then exempt all objects from later collections; call it when a model is ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


def refreeze_heap() -> None:
    """As `freeze_heap`, after a restart: the old engine's reference cycles are collected first."""
    gc.unfreeze()
    freeze_heap()
