"""Fetches and checks the files of a start: the model and what belongs to it.

The engine then gets local paths only, so it works without a network.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.model_source import with_files
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.start_parts import StartParts
from lmi_vllm.sources.base import DownloadProgress, FetchRequest
from lmi_vllm.sources.local import is_directory, is_file
from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.configuration import Configuration
from lmi_vllm.translate.model_files import mode_of

logger = logging.getLogger(__name__)

# Repositories that vLLM would fetch by itself, and the argument with their revision.
_ADDITIONAL_REPOSITORIES: Final = {"tokenizer": "tokenizer_revision", "hf_config_path": None}


@dataclass(frozen=True, slots=True)
class ReadyFiles:
    """The model with local paths, the final translation, and variables for the engine."""

    model: ModelArtifacts
    translation: Translation
    exports: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def arguments(self) -> EngineArguments:
        """The arguments that the engine is started with."""
        return self.translation.arguments


class ModelFetch:
    """Fetches the files of one start. `report` gets the progress, in another thread."""

    def __init__(
        self,
        model: ModelArtifacts,
        planned: Translation,
        configuration: Configuration,
        parts: StartParts,
        environ: Mapping[str, str],
        report: Callable[[DownloadProgress], None],
    ) -> None:
        self._model = model
        self._planned = planned
        self._configuration = configuration
        self._sources = configuration.sources
        self._parts = parts
        self._arguments = planned.arguments
        self._settings = settings = planned.settings
        self._environ = {**environ, **settings.environment_exports}
        self._report = report
        may_run = settings.server.lmi_custom_code != "none"
        made = parts.packages.value(model, self._environ, self._sources) if may_run else None
        self._packages = () if made is None else (made,)

    @property
    def is_streamed(self) -> bool:
        """Whether vLLM itself streams the weights from object storage."""
        load_format = str(self._arguments.values.get("load_format"))
        return load_format.startswith("runai_streamer") and self._sources.is_streamed_by_vllm(
            self._model.model
        )

    async def install_first(self) -> bool:
        """Install the packages that are known before the fetch.

        Returns whether the model that is still to be fetched has packages. vLLM must then be
        imported after them, since they may replace what it imports.
        """
        self._warn_of_packages(self._model)
        return any([await packages.install_first() for packages in self._packages])

    async def fetch(self) -> ReadyFiles:
        """Fetch the missing files and install packages.

        Raises:
            DownloadError: the text says what cannot be had and why.
            ConfigurationError: secure mode forbids what was fetched, or a feature cannot be set up.
        """
        model, translation = await self._fetch_model()
        arguments = translation.arguments
        for beside in self._parts.downloads:
            arguments = await beside(arguments, self._fetched)
        arguments = await self._fetch_additional(model, arguments)
        self._check_security(model)
        if self._model.directory is None:
            self._warn_of_packages(model)
        for packages in self._packages:
            await packages.install_fetched(model)
        exports = await asyncio.to_thread(self._variables, model, arguments)
        return ReadyFiles(model, replace(translation, arguments=arguments), exports)

    def _warn_of_packages(self, model: ModelArtifacts) -> None:
        """With LMI_CUSTOM_CODE=none nothing is installed: packages are built by their own code."""
        if self._settings.server.lmi_custom_code == "none" and model.directory is not None:
            file = model.directory / "requirements.txt"
            if file.is_file():
                logger.warning("%s is not installed: LMI_CUSTOM_CODE=none forbids it", file)

    def _variables(self, model: ModelArtifacts, arguments: EngineArguments) -> Mapping[str, str]:
        """The environment variables of features for the engine's libraries."""
        found: dict[str, str] = {}
        for variables in self._parts.start_variables:
            found |= variables(self._settings, model, arguments, self._environ)
        return found

    def with_failures(self, reason: str) -> str:
        """Return the engine's error with the failed installation that may explain it."""
        for packages in self._packages:
            reason = packages.with_failure(reason)
        return reason

    async def _fetch_model(self) -> tuple[ModelArtifacts, Translation]:
        planned = self._planned
        if self._model.is_local:
            return self._model, planned
        local = await self._fetched(
            self._model.model,
            self._model.revision,
            load_format=_text(self._arguments.values.get("load_format")),
            ignore_patterns=self._settings.model.ignore_patterns,
        )
        model = with_files(self._model, self._settings, local, self._sources)
        values: dict[str, object] = {**self._arguments.values, "model": str(local)}
        values.pop("revision", None)  # the fetched files are that revision
        if self.is_streamed:  # only the small files were fetched, without the weights
            values["model_weights"] = f"{self._model.model.rstrip('/*')}/"
        fetched = replace(self._arguments, values=values)
        translation = self._configuration.translator.translate_checkpoint(
            self._settings, model, planned.devices, fetched
        )
        if translation.errors:
            raise ConfigurationError(translation.errors)
        late = (*translation.warnings, *self._unread(model))
        new = [warning for warning in dict.fromkeys(late) if warning not in planned.warnings]
        for warning in new:
            logger.warning("%s", warning)
        return model, replace(translation, warnings=(*planned.warnings, *new))

    def _unread(self, model: ModelArtifacts) -> Iterator[str]:
        """Options that were found too late: in the only archive of a prefix."""
        path = model.directory / "serving.properties" if model.directory else None
        if path and path.is_file() and self._settings.properties is None:
            yield (
                f"{path} is not read: it was in an archive that is alone under its prefix; name "
                "the archive itself in HF_MODEL_ID"
            )

    async def _fetch_additional(
        self, model: ModelArtifacts, arguments: EngineArguments
    ) -> EngineArguments:
        """Fetch a tokenizer or configuration from another repository than the model's."""
        values = dict(arguments.values)
        for name, revision_name in _ADDITIONAL_REPOSITORIES.items():
            reference = values.get(name)
            if not isinstance(reference, str) or is_directory(reference) or is_file(reference):
                continue
            revision = _text(values.pop(revision_name, None)) if revision_name else None
            if reference == self._model.model and revision in (None, self._model.revision):
                values[name] = model.model
            else:
                values[name] = str(await self._fetched(reference, revision, load_format="dummy"))
        origins = dict(arguments.origins)
        for mode, origin in mode_of(values).items():  # the tokenizer's folder is known only now
            values["tokenizer_mode"], origins["tokenizer_mode"] = mode, origin
        return replace(arguments, values=values, origins=origins)

    async def _fetched(
        self,
        reference: str,
        revision: str | None,
        load_format: str | None = None,
        ignore_patterns: Sequence[str] | None = None,
    ) -> Path:
        named = self._settings.model.download_dir
        folder = Path(named) if named else None
        request = FetchRequest(
            reference, self._environ, revision, load_format, ignore_patterns, folder,
            on_progress=self._report,
        )  # fmt: skip
        return await asyncio.to_thread(self._sources.fetch_model, request)

    def _check_security(self, model: ModelArtifacts) -> None:
        security = self._configuration.security
        if violations := security.start_violations(self._settings, self._environ, model.directory):
            raise ConfigurationError(violations)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
