"""What features call in `serve` to add to a server; each call adds after those before it."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.server.code_start import MakeCode
from lmi_vllm.server.context import MakeProcesses, ServerLifespan
from lmi_vllm.server.engines import EngineChoices
from lmi_vllm.server.listeners import ListenerContext, RouteParts
from lmi_vllm.server.model_manager import WithoutModel
from lmi_vllm.server.parts import RunMode, ServerParts
from lmi_vllm.server.start_parts import (
    AdditionalDownload,
    AroundStart,
    MakePackages,
    PlannedStart,
    PlanVariables,
    StartParts,
    StartVariables,
)
from lmi_vllm.slot import Slot
from lmi_vllm.web.request import PathPrefix, RouteGroup


class StartBuilder:
    """What features do at each start of a model; see `StartParts`."""

    def __init__(self) -> None:
        self._packages: Slot[MakePackages] = Slot("packages of a model")
        self._code: Slot[MakeCode] = Slot("users' code")
        self._downloads: list[AdditionalDownload] = []
        self._checks: list[Callable[[Settings], Sequence[str]]] = []
        self._plan_variables: list[PlanVariables] = []
        self._start_variables: list[StartVariables] = []
        self._around: list[Callable[[PlannedStart], AroundStart | None]] = []

    def packages(self, make: MakePackages) -> None:
        """Set the installer of a model's packages."""
        self._packages.fill(make)

    def code(self, make: MakeCode) -> None:
        """Set what makes the loader of users' code."""
        self._code.fill(make)

    def download(self, download: AdditionalDownload) -> None:
        """Add a download besides the model; it returns the arguments with its path."""
        self._downloads.append(download)

    def check(self, check: Callable[[Settings], Sequence[str]]) -> None:
        """Add a check of a planned start, which returns its errors."""
        self._checks.append(check)

    def plan_variables(self, variables: PlanVariables) -> None:
        """Add environment variables for libraries, set when a start is planned."""
        self._plan_variables.append(variables)

    def start_variables(self, variables: StartVariables) -> None:
        """Add environment variables for the engine's libraries, once the files are fetched."""
        self._start_variables.append(variables)

    def around(self, make: Callable[[PlannedStart], AroundStart | None]) -> None:
        """Add hooks around a start; None where the settings do not ask for them."""
        self._around.append(make)

    def build(self) -> StartParts:
        """Return everything that was added."""
        return StartParts(
            self._packages.value,
            self._code.value,
            tuple(self._downloads),
            tuple(self._checks),
            tuple(self._plan_variables),
            tuple(self._start_variables),
            tuple(self._around),
        )


class ServerBuilder:
    """What features add to a server; `start` is for each start of a model."""

    def __init__(self) -> None:
        self.start = StartBuilder()
        self._routes: list[RouteGroup] = []
        self._of_listener: list[Callable[[ListenerContext], RouteGroup | None]] = []
        self._prefix: Slot[Callable[[Settings], PathPrefix | None]] = Slot("a prefix of paths")
        self._lifespans: list[ServerLifespan] = []
        self._processes: Slot[MakeProcesses] = Slot("front-end processes")
        self._without_model: Slot[WithoutModel] = Slot("a server without a model")
        self._run_modes: list[Callable[[Settings], RunMode | None]] = []
        self._own_engines: dict[str, Callable[[], EngineFactory]] = {}
        self._named_engines: dict[str, Callable[[Mapping[str, str]], EngineFactory]] = {}

    def routes(self, *groups: RouteGroup) -> None:
        """Add routes of every listener."""
        self._routes += groups

    def listener_routes(self, make: Callable[[ListenerContext], RouteGroup | None]) -> None:
        """Add routes that depend on the listener; None: it has none of them."""
        self._of_listener.append(make)

    def path_prefix(self, make: Callable[[Settings], PathPrefix | None]) -> None:
        """Set what makes a prefix in front of the paths of every listener."""
        self._prefix.fill(make)

    def lifespan(self, run: ServerLifespan) -> None:
        """Add what runs from the open port to the shutdown, within those before it."""
        self._lifespans.append(run)

    def processes(self, make: MakeProcesses) -> None:
        """Set what makes further front-end processes; None where the settings ask for none."""
        self._processes.fill(make)

    def without_model(self, make: WithoutModel) -> None:
        """Set what runs in a server that starts without a model."""
        self._without_model.fill(make)

    def run_mode(self, select: Callable[[Settings], RunMode | None]) -> None:
        """Add what `serve` runs in the place of the server; None where it is the server."""
        self._run_modes.append(select)

    def own_engine(self, name: str, make: Callable[[], EngineFactory]) -> None:
        """Add the engine of that `OwnEngine`."""
        self._own_engines[name] = make

    def named_engine(self, name: str, make: Callable[[Mapping[str, str]], EngineFactory]) -> None:
        """Add an engine that `--engine` takes by its name."""
        self._named_engines[name] = make

    def build(self) -> ServerParts:
        """Return everything that was added."""
        return ServerParts(
            self.start.build(),
            RouteParts(self._prefix.value, tuple(self._routes), tuple(self._of_listener)),
            EngineChoices(
                MappingProxyType(self._own_engines), MappingProxyType(self._named_engines)
            ),
            self._processes.value,
            self._without_model.value,
            tuple(self._lifespans),
            tuple(self._run_modes),
        )
