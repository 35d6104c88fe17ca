"""The protocol of engine factories, and control of the garbage collector around imports.

A full collection over the 600,000 objects that vLLM and torch import, all of which stay, stops the
event loop for 0.3 to 0.4 s, and with it every stream and every refusal; collections while they are
imported cost a fifth of the import (DECISIONS.md 42).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import EngineArguments, EngineSlot, ServingProfile


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
        slots: tuple[EngineSlot, ...] = (),
    ) -> Engine:
        """Return a running engine; other processes may take `slots` at it.

        Raises:
            ConfigurationError: it refuses an argument.
            EngineStartError: it did not come up.
        """
        ...

    def abandon(self) -> None:
        """End every process of a start that was cancelled."""
        ...


@contextmanager
def imports_without_collections() -> Iterator[None]:
    """Disable the garbage collector while the block imports, and freeze the objects it leaves."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_heap() -> None:
    """Collect, then exempt every live object from later collections; for when a model is ready."""
    gc.collect()
    gc.freeze()


def refreeze_heap() -> None:
    """As `freeze_heap` after a restart: the old engine's reference cycles are collected first."""
    gc.unfreeze()
    freeze_heap()
