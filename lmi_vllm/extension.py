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
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from lmi_vllm.engine.base import CheckGrammar, EngineGrammars
    from lmi_vllm.engine.vllm.outputs import TokenLane

T = TypeVar("T")
_PACKAGE: Final = "lmi_vllm.extras"
ORDER: Final = ("grammar_trials", "legacy_models", "media_urls", "pickled_adapters", "token_lane")


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
