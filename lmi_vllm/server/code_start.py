"""The protocol of loaders of users' code, and the loader that only warns of such code."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from lmi_vllm.adapters.source import CODE_FILE, CUSTOM_CODE
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import StartupError
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import FRAMINGS, ModelArtifacts, ServingProfile

logger = logging.getLogger(__name__)

# Variables with code for SageMaker's library in vLLM's application begin so.
HANDLERS: Final = ("CUSTOM_FASTAPI_", "CUSTOM_PRE_PROCESS", "CUSTOM_POST_PROCESS")


class ModelCode(Protocol):
    """The code of one model."""

    @property
    def hooks(self) -> Hooks:
        """The functions of the model's own file."""
        ...

    async def load_adapter(self, name: str, path: str, options: Mapping[str, str]) -> Hooks:
        """Return the adapter's hooks; `options` are the further parameters of its registration.

        Raises:
            AdapterRefusedError: its file cannot be loaded, or the model's code refuses it.
        """
        ...

    async def begin(self, engine: Engine) -> None:
        """Change the application of an engine that has come up, and call the handler at first.

        It gets an empty input; its failure is only logged.
        """
        ...


class CodeLoader(Protocol):
    """Checks and loads the code that the settings name."""

    def check(
        self, settings: Settings, model: ModelArtifacts, environ: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Return warnings of the code, without running it.

        Without `environ` the start is only planned: nothing is fetched, and the model may have
        packages that are not installed yet.

        Raises:
            StartupError: it cannot be loaded.
        """
        ...

    async def load(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        model: ModelArtifacts,
        profile: ServingProfile,
        engine: Engine,
    ) -> ModelCode:
        """Return the imported code; called after the engine's start, so that no fork copies it.

        Raises:
            StartupError: it cannot be imported, or lacks the function that the settings name.
        """
        ...


MakeCode = Callable[[], CodeLoader]


@dataclass(frozen=True, slots=True)
class UnloadedCode:
    """Loads nothing, for a reason; it warns of code that is there."""

    reason: str
    refusal: str  # the reason, as it follows "custom code, which"
    hooks: Hooks = NO_HOOKS

    def check(
        self, settings: Settings, model: ModelArtifacts, environ: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Check that no entry point is set; there are no warnings.

        Raises:
            StartupError: one is.
        """
        _ = model, environ
        entry_point = settings.model.entry_point
        if entry_point is None:
            return ()
        origin = settings.model.details.entry_point.origin
        raise StartupError(
            f"entryPoint ({origin}): {entry_point} is custom code, which {self.refusal}"
        )

    async def load(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        model: ModelArtifacts,
        profile: ServingProfile,
        engine: Engine,
    ) -> "UnloadedCode":
        """Return no code; warn of the model directory's code and of the settings for code."""
        _ = settings, engine
        warn_of_handlers(environ, self.reason)
        if model.directory is not None and (model.directory / CODE_FILE).is_file():
            logger.warning("%s is not loaded: %s", model.directory / CODE_FILE, self.reason)
        warn_of_unknown_formatter(profile, None, self.reason)
        return self

    async def load_adapter(self, name: str, path: str, options: Mapping[str, str]) -> Hooks:
        """Return no hooks; warn of a file that has some."""
        _ = options
        if (Path(path) / CODE_FILE).is_file():
            logger.warning("adapter %s: its %s is not loaded (%s)", name, CODE_FILE, self.reason)
        return NO_HOOKS

    async def begin(self, engine: Engine) -> None:
        """Call nothing: there is no code."""


SWITCHED_OFF: Final = UnloadedCode(f"{CUSTOM_CODE}=none", f"{CUSTOM_CODE}=none forbids")


def code_loader(settings: Settings, make: MakeCode) -> CodeLoader:
    """Return the loader that `make` makes, or with LMI_CUSTOM_CODE=none one that only warns."""
    return SWITCHED_OFF if settings.server.lmi_custom_code == "none" else make()


def warn_of_handlers(environ: Mapping[str, str], reason: str) -> None:
    """Warn of every variable with code for SageMaker's library: it has no effect."""
    for name in sorted(environ):
        if name.startswith(HANDLERS):
            logger.warning("%s has no effect: %s", name, reason)


def formatter_function(name: object) -> str | None:
    """Return the function's name in `output_formatter`; None for one of our formatters."""
    return str(name) if name is not None and str(name) not in FRAMINGS else None


def warn_of_unknown_formatter(
    profile: ServingProfile, function: str | None, reason: str = ""
) -> None:
    """Warn of an `output_formatter` that is neither one of ours nor `function`."""
    name = formatter_function(profile.output_formatter)
    if name is not None and name != function:
        logger.warning(
            "output_formatter %s is neither one of %s, nor a function of %s%s: it counts as unset",
            name,
            ", ".join(FRAMINGS),
            CODE_FILE,
            f" ({reason})" if reason else "",
        )
