"""The plan of a start, complete before anything is fetched and the engine is imported."""

import json
import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lmi_vllm.checks.platform import (
    check_cache_folders,
    check_shared_memory,
    check_temporary_folder,
)
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ConfigurationError, DownloadError
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.code_start import code_loader
from lmi_vllm.server.start_parts import StartParts
from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.configuration import Configuration
from lmi_vllm.translate.devices import detect_devices

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartPlan:
    """The meaning of the settings."""

    model: ModelArtifacts
    translation: Translation  # as far as known before the model is fetched
    shown_arguments: Mapping[str, object]  # the arguments as they may be printed
    # variables for libraries
    exports: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def arguments(self) -> EngineArguments:
        """What the engine is started with."""
        return self.translation.arguments

    def log(self) -> None:
        """Log the model and its source at the beginning of a start."""
        arguments = " ".join(
            f"{name}={json.dumps(value, default=str)}"
            for name, value in self.shown_arguments.items()
            if not self.arguments.origin_of(name).is_default and name != "model"
        )
        reference = mask_urls(self.model.reference)
        logger.info("model %s from %s; engine arguments: %s", self.model.name, reference, arguments)


def plan_start(
    configuration: Configuration,
    parts: StartParts,
    settings: Settings,
    environ: Mapping[str, str],
    exports: MutableMapping[str, str],
) -> StartPlan | None:
    """Return the planned start; None if the server is to start without a model.

    Blocks while the model's config.json is read, over the network if the model is not local.
    `exports` gets the variables that the hub's library reads at its import.

    Raises:
        StartupError: the settings name no model, or one that cannot be served.
    """
    exports.update(settings.environment_exports)
    own = {**environ, **settings.environment_exports}
    read, devices = configuration.reader(own), detect_devices(environ)
    translation = configuration.translator.translate_start(settings, environ, devices, read)
    explanation = configuration.explain(translation)
    if translation.files.is_missing and len(explanation.errors) == 1:
        raise DownloadError(explanation.errors[0])  # no fault of the settings' values
    if explanation.errors:
        raise ConfigurationError(explanation.errors)
    if translation.missing is not None:
        raise translation.missing
    model, arguments = translation.model, translation.arguments
    if model is None:
        return None
    security = configuration.security
    if violations := security.start_violations(settings, environ, model.directory):
        raise ConfigurationError(violations)
    if errors := tuple(error for check in parts.checks for error in check(settings)):
        raise ConfigurationError(errors)
    code = code_loader(settings, parts.code.value).check(settings, model)
    shared = check_shared_memory(arguments.number("tensor_parallel_size", 1))
    caches = [*check_cache_folders(own), *check_temporary_folder(own)]
    for warning in (*explanation.warnings, *code, *shared, *caches):
        logger.warning("%s", warning)
    shown = {name: explanation.engine_args.get(name) for name in arguments.values}
    chosen = _exports(parts, settings, arguments, environ)
    return StartPlan(model, translation, shown, chosen)


def _exports(
    parts: StartParts, settings: Settings, arguments: EngineArguments, environ: Mapping[str, str]
) -> Mapping[str, str]:
    """Variables for the engine's libraries, without those that are set already."""
    found: dict[str, str] = {}
    for variables in parts.plan_variables:
        found |= variables(arguments, environ)
    return MappingProxyType({**found, **settings.environment_exports})
