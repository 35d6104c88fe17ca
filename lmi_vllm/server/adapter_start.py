"""The adapters of a start: those in the model directory, then those of features.

An adapter of the model directory that fails ends the start.
"""

import logging
from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.copies import FetchedCopies
from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.adapters.loads import LoadCode
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.source import AdapterPolicy, AdapterSources, local_adapters
from lmi_vllm.checks.base_model import describe_base
from lmi_vllm.checks.chat_templates import own_chat_template
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import AdapterCapacityError, EngineMemoryError, LmiError, ModelSourceError
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.server.context import ModelContext
from lmi_vllm.server.model_files import ReadyFiles
from lmi_vllm.sources.local import is_directory, is_file
from lmi_vllm.translate.configuration import Configuration, SecurityChecks

logger = logging.getLogger(__name__)

DEFAULT_MAX_LORA_RANK = 16


async def load_adapters(
    ready: ReadyFiles,
    configuration: Configuration,
    context: ModelContext,
    engine: Engine,
    load_code: LoadCode,
) -> AdapterRegistry:
    """Return the registry with every adapter of this start loaded, those of features last.

    Raises:
        ModelSourceError: an adapter of the model directory is not usable.
        EngineMemoryError: there is no slot or memory for one.
    """
    model, settings, profile = ready.model, ready.translation.settings, ready.translation.profile
    folder = settings.model.adapters
    brought = local_adapters(
        Path(model.model) if configuration.sources.is_store(model.reference) else None, folder
    )
    local = {**brought, **local_adapters(model.directory, folder)}
    named = settings.model.lora_modules or {}
    paths = {name: Path(source) for name, source in named.items() if is_directory(source)}
    _refuse_twice(local, named)
    sources = _sources(ready, configuration, context.environ, {**local, **paths})
    registry = AdapterRegistry(
        engine,
        sources.resolve,
        is_enabled=profile.enable_lora,
        reserved_names=profile.served_names,
        slots=profile.adapter_slots,
        load_code=load_code,
        release=sources.release,
        hooks=lambda registry: _hooks(context, registry, sources),
        kept_awake=context.service.rest.kept_awake,
    )
    if not profile.enable_lora:
        return registry
    _warn_of_hidden(model, brought, local)
    for stated, adapter in _stated(settings, local, named, paths):
        await _register(registry, stated, adapter)
    for begin in registry.hooks.begin:
        await begin()
    return registry


def _hooks(
    context: ModelContext, registry: AdapterRegistry, sources: AdapterSources
) -> AdapterHooks:
    return context.adapter_hooks(registry, sources) if registry.is_enabled else AdapterHooks()


def _stated(
    settings: Settings, local: Mapping[str, Path], named: Mapping[str, str], paths: Container[str]
) -> Iterator[tuple[str, Adapter]]:
    """Yield the adapters of the model directory and of lora_modules, and how errors name them."""
    for name, path in local.items():
        yield f"local adapter {name}", Adapter(name, str(path), is_local=True)
    origin = settings.model.details.lora_modules.origin
    for name, source in named.items():
        adapter = Adapter(name, source, is_local=name in paths)
        yield f"lora_modules ({origin}): adapter {name}", adapter


async def _register(registry: AdapterRegistry, stated: str, adapter: Adapter) -> None:
    """Register an adapter of the start; its error names it as `stated`."""
    try:
        await registry.register(adapter)
    except AdapterCapacityError as error:
        raise EngineMemoryError(f"{stated}: {error.text}") from error
    except LmiError as error:
        reason = error.text.removeprefix(f"Adapter {adapter.name}: ")  # `stated` has the name
        raise ModelSourceError(f"{stated}: {reason}") from error


def _refuse_twice(local: Mapping[str, Path], named: Mapping[str, str]) -> None:
    """Refuse a name that the model directory and lora_modules both have."""
    for name in sorted(local.keys() & named.keys()):
        raise ModelSourceError(
            f"adapter {name} is in the model directory ({local[name]}) and in lora_modules"
        )


def _sources(
    ready: ReadyFiles,
    configuration: Configuration,
    environ: Mapping[str, str],
    local: Mapping[str, Path],
) -> AdapterSources:
    model, settings = ready.model, ready.translation.settings
    policy = adapter_policy(settings, configuration.security)
    rank = ready.arguments.number("max_lora_rank", DEFAULT_MAX_LORA_RANK)
    # Its path is the local one; its reference decides which paths adapters may name.
    base = describe_base(Path(model.model), (model.reference, model.model, model.name), rank)
    own = frozenset(map(str, local.values()))
    known = {**environ, **settings.environment_exports}
    return AdapterSources(
        configuration.sources,
        known,
        policy,
        base,
        model.directory,
        own,
        _served_chat_template(ready),
        FetchedCopies(known),
    )


def _served_chat_template(ready: ReadyFiles) -> str:
    """Return what `option.chat_template` says or names, else the model's own template."""
    named = ready.translation.profile.chat_template
    if named is None:
        return own_chat_template(Path(ready.model.model))[1]
    return Path(named).read_text(encoding="utf-8") if is_file(named) else named


def _warn_of_hidden(
    model: ModelArtifacts, brought: Mapping[str, Path], used: Mapping[str, Path]
) -> None:
    """Warn of adapters of a prefix that the model directory replaces."""
    for name, path in brought.items():
        if path != used[name]:
            place = mask_urls(model.reference)
            logger.warning("adapter %s: %s is used, not the one of %s", name, used[name], place)


def adapter_policy(settings: Settings, security: SecurityChecks) -> AdapterPolicy:
    """Return the settings for adapters that are registered."""
    server = settings.server
    return AdapterPolicy(
        hub=server.lmi_adapter_hub,
        named=frozenset((settings.model.lora_modules or {}).values()),
        roots=server.adapter_roots,
        max_bytes=server.lmi_adapter_max_size,
        code=server.lmi_custom_code,
        is_secure=bool(server.sagemaker_secure_mode),
        forbidden=partial(security.adapter_violations, settings),
    )
