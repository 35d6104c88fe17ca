"""The adapters of a start: those in the model directory, then those of the state file.

An adapter of the model directory that fails stops the start. One of the state file does not: the
others come back, the log names it, and its entry stays in the file until its name is registered
again (a source may be out of reach for an hour; forgetting it would be for good).
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lmi_vllm.adapters.adapter import Adapter, read_state, write_state
from lmi_vllm.adapters.check import describe_base
from lmi_vllm.adapters.loads import LoadCode
from lmi_vllm.adapters.registry import AdapterRegistry, ignore_change
from lmi_vllm.adapters.source import AdapterSources, local_adapters
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import LmiError, ModelSourceError
from lmi_vllm.messages import EngineArguments, ModelArtifacts, ServingProfile
from lmi_vllm.sources.local import is_url, without_file_scheme
from lmi_vllm.sources.table import is_store

logger = logging.getLogger(__name__)

DEFAULT_MAX_LORA_RANK = 16


Announce = Callable[[AdapterRegistry, AdapterSources], Awaitable[None]]


class AdapterStateFile:
    """The state file: registered adapters, and entries that could not be restored at this start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unrestored: dict[str, Adapter] = {}
        self._is_restored = False

    async def restore(self, registry: AdapterRegistry) -> None:
        """Register every adapter of the file.

        Raises:
            ModelSourceError: the file cannot be read.
        """
        for adapter in read_state(self._path):
            await self._restore_one(registry, adapter)
        self._is_restored = True

    def keep(self, adapters: Collection[Adapter]) -> None:
        """Write the file; local adapters, and those that are found, come back without it."""
        if not self._is_restored:
            return
        kept = {
            adapter.name: adapter
            for adapter in adapters
            if not (adapter.is_local or adapter.is_found)
        }
        self._unrestored = {
            name: adapter for name, adapter in self._unrestored.items() if name not in kept
        }
        write_state(self._path, [*kept.values(), *self._unrestored.values()])

    async def _restore_one(self, registry: AdapterRegistry, adapter: Adapter) -> None:
        try:
            await registry.register(adapter)
        except LmiError as error:
            logger.error(
                "adapters_state %s: adapter %s could NOT be restored: %s",
                self._path,
                adapter.name,
                error.text,
            )
            self._unrestored[adapter.name] = adapter


async def load_adapters(  # noqa: PLR0913 (what a start knows, once)
    model: ModelArtifacts,
    arguments: EngineArguments,
    profile: ServingProfile,
    settings: Settings,
    environ: Mapping[str, str],
    engine: Engine,
    *,
    load_code: LoadCode,
    announce: Sequence[Announce] = (),
) -> AdapterRegistry:
    """Return the registry with every adapter of this start loaded, once it has been announced.

    Raises:
        ModelSourceError: an adapter of the model directory is not usable, or the state file.
    """
    state = without_file_scheme(settings.model.adapters_state or "")
    is_file = state and profile.enable_lora and not is_url(state)
    memory = AdapterStateFile(Path(state)) if is_file else None
    folder = str(settings.model.adapters or "adapters")
    local = _local(model, folder)
    sources = replace(_sources(model, arguments, environ), own=frozenset(map(str, local.values())))
    registry = AdapterRegistry(
        engine,
        sources.resolve,
        is_enabled=profile.enable_lora,
        reserved_names=profile.served_names,
        load_code=load_code,
        on_change=memory.keep if memory else ignore_change,
    )
    if not profile.enable_lora:
        return registry
    _warn_of_hidden(model, folder, local)
    for name, path in local.items():
        try:
            await registry.register(Adapter(name, str(path), is_local=True))
        except LmiError as error:
            raise ModelSourceError(f"local adapter {name}: {error.text}") from error
    if memory:
        await memory.restore(registry)
    for tell in announce:
        await tell(registry, sources)
    return registry


def _local(model: ModelArtifacts, folder: str) -> dict[str, Path]:
    """The adapters of the model directory, then those of a prefix that brought the weights."""
    return {**_brought(model, folder), **local_adapters(model.directory, folder)}


def _brought(model: ModelArtifacts, folder: str) -> dict[str, Path]:
    return local_adapters(Path(model.model) if is_store(model.reference) else None, folder)


def _warn_of_hidden(model: ModelArtifacts, folder: str, used: Mapping[str, Path]) -> None:
    """Name the adapters of a prefix that one of the model directory stands in for."""
    for name, path in _brought(model, folder).items():
        if path != used[name]:
            place = mask_urls(model.reference)
            logger.warning("adapter %s: %s is used, not the one of %s", name, used[name], place)


def _sources(
    model: ModelArtifacts, arguments: EngineArguments, environ: Mapping[str, str]
) -> AdapterSources:
    rank = arguments.number("max_lora_rank", DEFAULT_MAX_LORA_RANK)
    # Its path is where the files are by now; its reference is what adapters may name.
    base = describe_base(Path(model.model), (model.reference, model.model, model.name), rank)
    return AdapterSources(environ, base, model.directory)
