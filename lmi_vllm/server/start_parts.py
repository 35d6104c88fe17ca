"""What features do at the start of a model, and the protocols of that."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lmi_vllm.config.settings import Settings
from lmi_vllm.inference.start_progress import StartProgress
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.code_start import MakeCode
from lmi_vllm.slot import Slot
from lmi_vllm.sources.table import Sources

PlanVariables = Callable[[EngineArguments, Mapping[str, str]], Mapping[str, str]]
# Called in a thread with settings, model, the engine's arguments and the environment.
StartVariables = Callable[
    [Settings, ModelArtifacts, EngineArguments, Mapping[str, str]], Mapping[str, str]
]
# From a reference and its revision to the local path.
Fetch = Callable[[str, str | None], Awaitable[Path]]
AdditionalDownload = Callable[[EngineArguments, Fetch], Awaitable[EngineArguments]]
MakePackages = Callable[[ModelArtifacts, Mapping[str, str], Sources], "ModelPackages"]


class ModelPackages(Protocol):
    """Packages that a feature installs for one model. A failure does not end the start."""

    async def install_first(self) -> bool:
        """Install packages that are known before the fetch; return whether the fetch has more."""
        ...

    async def install_fetched(self, model: ModelArtifacts) -> None:
        """Install the packages of the fetched model."""
        ...

    def with_failure(self, reason: str) -> str:
        """Return the engine's error with a failed installation that may explain it."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """A planned start, for features; `engine` is the name of the engine that will run."""

    engine: str
    settings: Settings
    environ: Mapping[str, str]
    model: ModelArtifacts
    arguments: EngineArguments
    sources: Sources
    progress: StartProgress = field(default_factory=StartProgress)


# Called in a thread once the model's files are local, with the final arguments; vLLM may still be
# imported then. It must not raise.
OnFiles = Callable[[PlannedStart], object]


class AroundStart(Protocol):
    """Hooks of a feature around one start of a model; none of them may raise."""

    @property
    def exports(self) -> Mapping[str, str]:
        """Variables that must be set before the engine is imported."""
        ...

    async def before_engine(self) -> None:
        """Prepare while the model is fetched; the engine starts once this returns."""
        ...

    def after_ready(self) -> None:
        """Called after each warm-up: at the start and after every restart."""
        ...


class StartParts:
    """What features do at each start of a model.

    A download returns the arguments with its path. `checks` return the errors of a planned start.
    `plan_variables` are for libraries of this process, `start_variables` for the engine's, once the
    model's files are fetched. `around` are hooks; None where the settings do not ask for them.
    `on_files` is called once the files are local.
    """

    def __init__(self) -> None:
        self.packages = Slot[MakePackages]("packages of a model")
        self.code = Slot[MakeCode]("users' code")
        self.downloads: list[AdditionalDownload] = []
        self.checks: list[Callable[[Settings], Sequence[str]]] = []
        self.plan_variables: list[PlanVariables] = []
        self.start_variables: list[StartVariables] = []
        self.around: list[Callable[[PlannedStart], AroundStart | None]] = []
        self.on_files: list[OnFiles] = []
