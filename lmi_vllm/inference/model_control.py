"""What management routes may ask of the part that loads models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from lmi_vllm.errors import ModelCapacityError


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a description says of the model besides its state."""

    url: str = ""
    is_loaded_at_startup: bool = True
    start_time: str = ""
    device_type: str = "cpu"
    batch_size: int = 1
    max_batch_delay: int = 100  # milliseconds
    max_idle_time: int = 60  # seconds
    # Figures for clients that check them: one engine serves whatever comes.
    min_workers: int = 1
    max_workers: int = 1


@dataclass(frozen=True, slots=True)
class NewModel:
    """A model to load: `url` is a folder, a URL that a source claims, or a hub id."""

    url: str
    name: str = ""  # empty: as the URL says
    is_synchronous: bool = True
    arguments: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


class ModelControl(Protocol):
    """Loads and unloads the one model of a server that was started without."""

    async def register(self, new: NewModel) -> str:
        """Load the model and return its name; not synchronous, only begin to.

        Raises:
            ModelCapacityError: another model is there, or memory is not enough.
            ResourceNotFoundError: there is nothing at the URL.
            BadParameterError: it cannot be served.
        """
        ...

    async def unregister(self) -> None:
        """Refuse new requests, let the running ones end, and free what the model holds."""
        ...


class OneModelOnly:
    """The control of a server whose model came with its start."""

    async def register(self, new: NewModel) -> str:
        """Refuse: there is one model per process."""
        raise ModelCapacityError(
            f"{new.url} cannot be loaded: this server serves one model per process, the one it was "
            "started with; start another server, or this one with load_models=NONE"
        )

    async def unregister(self) -> None:
        """Refuse: the model belongs to the process."""
        raise ModelCapacityError("the model this server was started with cannot be unregistered")
