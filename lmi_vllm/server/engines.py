"""The table of engines: by name, and engines of features by the models that they run."""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Final

from lmi_vllm.checks.model import OwnEngines
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine, EngineClient
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.engine.vllm.client_parts import EngineParts
from lmi_vllm.engine.vllm.factory import VllmFactory
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments, ServingProfile

VLLM: Final = "vllm"


class EngineChoices:
    """What features do in vLLM, and engines besides it.

    `own` are for models that vLLM does not run, by the name of their `OwnEngine`. `named` are those
    that `--engine` takes by their names, which are made with the variables as they came.
    """

    def __init__(self) -> None:
        self.vllm = EngineParts()
        self.own: dict[str, Callable[[], EngineFactory]] = {}
        self.named: dict[str, Callable[[Mapping[str, str]], EngineFactory]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The values of `--engine`."""
        return (VLLM, *self.named)


def check_engine_kind(settings: Settings, kind: str) -> None:
    """Check that the engine supports the number of front-end processes.

    Raises:
        ConfigurationError: it supports one process only.
    """
    setting = settings.server.details.lmi_frontend_processes
    if kind != VLLM and setting.value != 1:
        raise ConfigurationError([f"{setting.stated} needs --engine vllm (got {kind})"])


def engine_factory(
    name: str,
    environ: Mapping[str, str],
    exports: MutableMapping[str, str],
    log_format: str,
    own: OwnEngines,
    choices: EngineChoices,
) -> EngineFactory:
    """Return the factory of that name; with vLLM's, models of `own` engines get those.

    `environ` are the variables that the server got, `exports` those of its process.
    """
    if name == VLLM:
        return EnginesByModel(VllmFactory(exports, log_format, choices.vllm), own, choices.own)
    return choices.named[name](environ)


class EnginesByModel:
    """The engine of a feature for the models that it runs, the named one for all others."""

    def __init__(
        self,
        usual: EngineFactory,
        own: OwnEngines,
        factories: Mapping[str, Callable[[], EngineFactory]],
    ) -> None:
        self._usual = usual
        self._of_models = own
        self._factories = factories
        self._own: dict[str, EngineFactory] = {}

    def kind(self, arguments: EngineArguments) -> str:
        """Return the engine for this model; it may change once its config.json is there."""
        return self._of(arguments).kind(arguments)

    @property
    def reads_model(self) -> bool:
        """See `EngineFactory.reads_model`."""
        return self._usual.reads_model

    async def load(self, arguments: EngineArguments) -> None:
        """Load the engine that is expected to run the model; see `EngineFactory.load`."""
        await self._of(arguments).load(arguments)

    async def start(
        self,
        arguments: EngineArguments,
        profile: ServingProfile,
        clients: tuple[EngineClient, ...] = (),
    ) -> Engine:
        """Start the engine of the model, whose files are local; see `EngineFactory.start`."""
        return await self._of(arguments).start(arguments, profile, clients)

    def abandon(self) -> None:
        """See `EngineFactory.abandon`."""
        self._usual.abandon()

    def _of(self, arguments: EngineArguments) -> EngineFactory:
        engine = self._of_models.of(arguments.architectures, arguments.values)
        if engine is None:
            return self._usual
        if engine.name not in self._own:
            self._own[engine.name] = self._factories[engine.name]()
        return self._own[engine.name]
