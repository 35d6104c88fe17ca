"""Everything that features add to a server in `serve`, each after those before it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass

from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.server.context import MakeProcesses, ModelPart, ServerLifespan
from lmi_vllm.server.engines import EngineChoices
from lmi_vllm.server.listeners import RouteParts
from lmi_vllm.server.model_manager import WithoutModel
from lmi_vllm.server.start_parts import StartParts
from lmi_vllm.slot import Slot
from lmi_vllm.translate.configuration import Configuration

# Run by `serve` instead of the server; returns the exit code and the reason. It gets the assembled
# parts, settings, command line, variables, engine factory, `os.environ` and the stop event.
RunMode = Callable[
    ["Assembled", Settings, CommandLine, Mapping[str, str], EngineFactory,
     MutableMapping[str, str], asyncio.Event],
    Awaitable[tuple[int, str]],
]  # fmt: skip


class ServerParts:
    """What features add to a server, and to each start of a model, its routes and engines.

    `lifespans` are from the open port to the shutdown, the first outermost. `model_parts` are made
    with each model's settings, and live as long as it. `processes` makes further front-end
    processes, `without_model` what runs in a server that starts without a model. `run_modes` may
    run in the place of the server; each returns None where it is the server.
    """

    def __init__(self) -> None:
        self.start = StartParts()
        self.routes = RouteParts()
        self.engines = EngineChoices()
        self.processes = Slot[MakeProcesses]("front-end processes")
        self.without_model = Slot[WithoutModel]("a server without a model")
        self.lifespans: list[ServerLifespan] = []
        self.model_parts: list[ModelPart] = []
        self.run_modes: list[Callable[[Settings], RunMode | None]] = []


@dataclass(frozen=True, slots=True)
class Assembled:
    """A server's configuration and parts."""

    configuration: Configuration
    parts: ServerParts
