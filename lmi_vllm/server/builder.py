"""What features call in `serve` to add to a server; each call adds after those before it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING

from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import CheckGrammar
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.engine.vllm.client_parts import EngineParts
from lmi_vllm.engine.vllm.parts import ConvertPickle
from lmi_vllm.messages import MediaPolicy
from lmi_vllm.server.code_start import MakeCode
from lmi_vllm.server.context import MakeProcesses, ModelPart, ServerLifespan
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

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.outputs import TokenLane


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


class EngineBuilder:
    """What features do in vLLM (see `EngineParts`), and engines besides it."""

    def __init__(self) -> None:
        self._media: Slot[Callable[[MediaPolicy], None]] = Slot("media of messages")
        self._grammars: Slot[Callable[[object, float, ThreadPoolExecutor], CheckGrammar]] = Slot(
            "trials of grammars"
        )
        self._lane: Slot[Callable[[object], TokenLane]] = Slot("token lane")
        self._pickles: Slot[ConvertPickle] = Slot("pickled weights")
        self._own: dict[str, Callable[[], EngineFactory]] = {}
        self._named: dict[str, Callable[[Mapping[str, str]], EngineFactory]] = {}

    def media(self, guard: Callable[[MediaPolicy], None]) -> None:
        """Set what has vLLM load media of messages, within a policy."""
        self._media.fill(guard)

    def grammar_trials(
        self, make: Callable[[object, float, ThreadPoolExecutor], CheckGrammar]
    ) -> None:
        """Set what tries a grammar before the engine gets it."""
        self._grammars.fill(make)

    def token_lane(self, make: "Callable[[object], TokenLane]") -> None:
        """Set what takes tokens of plain requests before vLLM's output processor."""
        self._lane.fill(make)

    def pickled_weights(self, convert: ConvertPickle) -> None:
        """Set what turns the pickle of an adapter into safetensors."""
        self._pickles.fill(convert)

    def own(self, name: str, make: Callable[[], EngineFactory]) -> None:
        """Add the engine of that `OwnEngine`."""
        self._own[name] = make

    def named(self, name: str, make: Callable[[Mapping[str, str]], EngineFactory]) -> None:
        """Add an engine that `--engine` takes by its name."""
        self._named[name] = make

    def build(self) -> EngineChoices:
        """Return everything that was added."""
        vllm = EngineParts(
            self._media.value, self._grammars.value, self._lane.value, self._pickles.value
        )
        return EngineChoices(vllm, MappingProxyType(self._own), MappingProxyType(self._named))


class ServerBuilder:
    """What features add to a server; `start` is for each start of a model, `engine` for engines."""

    def __init__(self) -> None:
        self.start = StartBuilder()
        self.engine = EngineBuilder()
        self._routes: list[RouteGroup] = []
        self._of_listener: list[Callable[[ListenerContext], RouteGroup | None]] = []
        self._prefix: Slot[Callable[[Settings], PathPrefix | None]] = Slot("a prefix of paths")
        self._lifespans: list[ServerLifespan] = []
        self._model_parts: list[ModelPart] = []
        self._processes: Slot[MakeProcesses] = Slot("front-end processes")
        self._without_model: Slot[WithoutModel] = Slot("a server without a model")
        self._run_modes: list[Callable[[Settings], RunMode | None]] = []

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

    def model_part(self, part: ModelPart) -> None:
        """Add what is made with each model's settings, and lives as long as it."""
        self._model_parts.append(part)

    def processes(self, make: MakeProcesses) -> None:
        """Set what makes further front-end processes; None where the settings ask for none."""
        self._processes.fill(make)

    def without_model(self, make: WithoutModel) -> None:
        """Set what runs in a server that starts without a model."""
        self._without_model.fill(make)

    def run_mode(self, select: Callable[[Settings], RunMode | None]) -> None:
        """Add what `serve` runs in the place of the server; None where it is the server."""
        self._run_modes.append(select)

    def build(self) -> ServerParts:
        """Return everything that was added."""
        return ServerParts(
            self.start.build(),
            RouteParts(self._prefix.value, tuple(self._routes), tuple(self._of_listener)),
            self.engine.build(),
            self._processes.value,
            self._without_model.value,
            tuple(self._lifespans),
            tuple(self._model_parts),
            tuple(self._run_modes),
        )
