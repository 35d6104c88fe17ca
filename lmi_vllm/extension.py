"""The extension points of the core, and how extras are found.

An extra is a package `lmi_vllm/extras/<name>/` whose `__init__.py` declares `EXTRA = Extra(...)`.
`ORDER` lists them all. Extras
import the core. The core imports none of them and calls `extensions` where it can be extended. An
`__init__.py` imports this module and nothing slow. A `Lazy` names a value that needs a library, or
a package of the core. It is imported when it is used, so `explain` and `--help` stay fast.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from lmi_vllm.commands.serve import RunMode
    from lmi_vllm.config.settings import Settings
    from lmi_vllm.engine.base import CheckGrammar, EngineGrammars
    from lmi_vllm.engine.factory import EngineFactory
    from lmi_vllm.engine.vllm.outputs import TokenLane
    from lmi_vllm.server.code_start import CodeLoader
    from lmi_vllm.server.context import MakeProcesses, ServerLifespan
    from lmi_vllm.server.listeners import ListenerContext
    from lmi_vllm.server.model_files import AdditionalDownload, MakePackages, StartVariables
    from lmi_vllm.server.model_manager import WithoutModel
    from lmi_vllm.server.plan import AroundStart, PlannedStart, PlanVariables
    from lmi_vllm.web.request import PathPrefix, RouteGroup

T = TypeVar("T")
_PACKAGE: Final = "lmi_vllm.extras"
# Extras of the serve side. What comes first is asked first: its routes and request steps are before
# those of others. Its lifespan begins first and ends last.
ORDER: Final = (
    # Files of models and adapters.
    "requirements", "pickled_adapters", "custom_code", "speculation", "lmcache",
    # What may refuse a start or a request.
    "free_memory", "grammar_trials", "media_urls",
    # Engines and processes.
    "legacy_models", "seq2seq", "scripted", "token_lane", "compile_cache", "front_ends", "nodes",
    # Adapters: a name is looked for in the store before it is shared with other replicas.
    "adapter_store", "adapters_state", "vllm_adapters", "lora_series",
    # Requests: one with a deferred answer has a session like any other; texts are embedded last.
    "deferred", "sessions", "text_embedding",
    # Routes; what `api_docs` describes is above it.
    "root_path", "management", "kserve", "tgi", "api_docs", "console",
    # What watches and reports; traces are sent off once sessions have been copied.
    "error_rates", "watchdogs", "exporters", "load_reports", "start_summary", "traces",
)  # fmt: skip


@dataclass(frozen=True)
class Lazy(Generic[T]):
    """A value by its place, `package.module:name`; imported when it is used."""

    place: str

    def load(self) -> T:
        """Return the value; its module is imported now."""
        module, _, name = self.place.partition(":")
        value: T = getattr(importlib.import_module(module), name)
        return value


@dataclass(frozen=True, slots=True)
class Extra:
    """Everything that one extra adds."""

    # Routes of every listener, and those that depend on the listener (None: it has none of them).
    routes: "tuple[Lazy[RouteGroup], ...]" = ()
    listener_routes: "tuple[Lazy[Callable[[ListenerContext], RouteGroup | None]], ...]" = ()
    # A prefix in front of the paths of every listener; one extra has it.
    path_prefix: "Lazy[Callable[[Settings], PathPrefix | None]] | None" = None
    # The loader of users' code: the model's own, and that of adapters.
    custom_code: "Lazy[Callable[[], CodeLoader]] | None" = None
    # Engines for models that vLLM does not run, by name, and those that `--engine` takes by their
    # names, which are made with the variables as they came.
    engines: "Mapping[str, Lazy[Callable[[], EngineFactory]]]" = field(
        default_factory=lambda: MappingProxyType({})
    )
    named_engines: "Mapping[str, Lazy[Callable[[Mapping[str, str]], EngineFactory]]]" = field(
        default_factory=lambda: MappingProxyType({})
    )
    # What has vLLM load media of messages, within a `MediaPolicy`; one extra has it.
    media: "Lazy[Callable[[Any], None]] | None" = None
    # What tries a grammar before the engine gets it, made with the engine's client, and with the
    # seconds and the thread of its trials; one extra has it.
    grammar_trials: "Lazy[Callable[[object, float, ThreadPoolExecutor], CheckGrammar]] | None" = (
        None
    )
    # What watches grammars in the engine, made with its scheduler; one extra has it.
    engine_grammars: "Lazy[Callable[[object], EngineGrammars]] | None" = None
    # What takes tokens of plain requests before vLLM's output processor, made with the tokenizer;
    # one extra has it.
    token_lane: "Lazy[Callable[[object], TokenLane]] | None" = None
    # What turns the pickle of an adapter into safetensors, given both paths, and returns why that
    # cannot be; one extra has it.
    pickled_weights: "Lazy[Callable[[Path, Path], str]] | None" = None
    # Model classes to register with vLLM: name in `architectures` -> `module:Class`.
    model_classes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # Downloads in addition to the model (draft models); each returns the arguments with their path.
    additional_downloads: "tuple[Lazy[AdditionalDownload], ...]" = ()
    # The installer of a model's packages; one extra has it.
    packages: "Lazy[MakePackages] | None" = None
    # Environment variables for libraries, set when a start is planned.
    plan_variables: "tuple[Lazy[PlanVariables], ...]" = ()
    # Environment variables for the engine's libraries, set once the model's files are fetched.
    start_variables: "tuple[Lazy[StartVariables], ...]" = ()
    # What `serve` runs with these settings in the place of the server; None where it is the server.
    run_modes: "tuple[Lazy[Callable[[Settings], RunMode | None]], ...]" = ()
    # Checks of a planned start; each returns its errors.
    plan_checks: "tuple[Lazy[Callable[[Settings], Sequence[str]]], ...]" = ()
    # What runs in a server that starts without a model; one extra has it.
    without_model: "Lazy[WithoutModel] | None" = None
    # Hooks around each start of a model; None where the settings do not ask for them.
    around_start: "Lazy[Callable[[PlannedStart], AroundStart | None]] | None" = None
    # Its lifespan, from the open port to the shutdown: an async context manager that puts request
    # steps and observers in place.
    lifespan: "Lazy[ServerLifespan] | None" = None
    # Further front-end processes; None where the settings ask for none.
    processes: "Lazy[MakeProcesses] | None" = None


@functools.cache
def extras() -> Mapping[str, Extra]:
    """Return every extra by name, in their order."""
    return MappingProxyType(
        {name: importlib.import_module(f"{_PACKAGE}.{name}").EXTRA for name in ORDER}
    )


def extensions(point: Callable[[Extra], "Lazy[T] | tuple[Lazy[T], ...] | None"]) -> Iterator[T]:
    """Yield the values of an extension point, from all extras; each is imported when reached."""
    for extra in extras().values():
        value = point(extra)
        places = (value,) if isinstance(value, Lazy) else value or ()
        yield from (place.load() for place in places)


def extension(point: Callable[[Extra], Lazy[T] | None]) -> T:
    """Return the value of an extension point that one extra has.

    Raises:
        ValueError: two extras have it, or none.
    """
    found = {name: place for name, extra in extras().items() if (place := point(extra))}
    if len(found) != 1:
        raise ValueError(f"one extra must provide this: {' and '.join(found) or 'none does'}")
    (place,) = found.values()
    return place.load()
