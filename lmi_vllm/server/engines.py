"""The table of engines: by name, and those of extras by the models that they take."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import own_engine
from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.engine.scripted import ScriptedEngine, ScriptedFactory
from lmi_vllm.engine.vllm.factory import VllmFactory
from lmi_vllm.messages import EngineArguments, EngineSlot, ServingProfile

SCRIPTED_SECONDS: Final = "LMI_SCRIPTED_SECONDS_PER_TOKEN"


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """What factories are made with: variables as they came, those of this process, log format."""

    environ: Mapping[str, str]
    exports: MutableMapping[str, str]
    log_format: str


def _vllm(environment: EngineEnvironment) -> EngineFactory:
    return EnginesByModel(VllmFactory(environment.exports, environment.log_format))


def _scripted(environment: EngineEnvironment) -> EngineFactory:
    seconds = float(environment.environ.get(SCRIPTED_SECONDS, "0"))
    return ScriptedFactory(lambda: ScriptedEngine(seconds_per_token=seconds))


# What `--engine` takes. An extra adds an engine for models of its own: `Extra.engines`.
ENGINES: Final[Mapping[str, Callable[[EngineEnvironment], EngineFactory]]] = MappingProxyType(
    {"vllm": _vllm, "scripted": _scripted}
)


class EnginesByModel:
    """The engine of an extra for the models that it takes, the usual one for all others."""

    def __init__(self, usual: EngineFactory) -> None:
        self._usual = usual
        self._own: dict[str, EngineFactory] = {}

    def kind(self, arguments: EngineArguments) -> str:
        """Return the name of the engine for this model; it may change when the model is here."""
        return self._of(arguments).kind(arguments)

    @property
    def reads_model(self) -> bool:
        """See `EngineFactory.reads_model`."""
        return self._usual.reads_model

    async def load(self, arguments: EngineArguments) -> None:
        """Load the engine that is known to run the model; see `EngineFactory.load`."""
        await self._of(arguments).load(arguments)

    async def start(
        self,
        arguments: EngineArguments,
        profile: ServingProfile,
        slots: tuple[EngineSlot, ...] = (),
    ) -> Engine:
        """Start the engine of the model, whose files are here; see `EngineFactory.start`."""
        return await self._of(arguments).start(arguments, profile, slots)

    def abandon(self) -> None:
        """See `EngineFactory.abandon`."""
        self._usual.abandon()

    def _of(self, arguments: EngineArguments) -> EngineFactory:
        engine = own_engine(arguments.values)
        if engine is None:
            return self._usual
        return self._own.setdefault(engine.name, engine.factory.load()())
