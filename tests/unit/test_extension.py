"""The registry of extras: one list in an order that means something, and what it names exists."""

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path

import pytest

import lmi_vllm
from lmi_vllm import extension as extension_module
from lmi_vllm.extension import ORDER, Extra, Lazy, Verb, extension, extensions, extras
from tests.unit.test_imports_exist import defined

FOLDER = Path(lmi_vllm.__file__).parent / "extras"
IMPORT_VLLM = {"token_lane"}  # ten seconds
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def places(value: object) -> Iterator[str]:
    """Yield every place that an extra names, those within its rows included."""
    if isinstance(value, Lazy):
        yield value.place
    elif isinstance(value, Verb):
        yield from (f"{value.module}:add_arguments", f"{value.module}:run")
    elif isinstance(value, tuple):
        yield from chain(*map(places, value))
    elif isinstance(value, Mapping):
        yield from chain(*map(places, value.values()))
    elif is_dataclass(value):
        yield from chain(*(places(getattr(value, field.name)) for field in fields(value)))


def test_every_folder_is_in_the_order() -> None:
    """Once, at the place that was chosen for it."""
    assert sorted(extras()) == NAMES
    assert list(extras()) == list(ORDER)
    assert all(isinstance(extra, Extra) for extra in extras().values())


def test_extension_point_is_read_from_all_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the list."""
    found = {
        "a": Extra(rules=(Lazy("math:sin"), Lazy("math:cos"))),
        "b": Extra(rules=(Lazy("math:tan"),), tls=Lazy("math:exp")),
    }
    monkeypatch.setattr(extension_module, "extras", lambda: found)
    assert [*extensions(lambda extra: extra.rules)] == [math.sin, math.cos, math.tan]
    assert [*extensions(lambda extra: extra.tls)] == [math.exp]
    assert extension(lambda extra: extra.tls) is math.exp


def test_second_provider_of_one_thing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both names: none of them wins without a message."""
    found = {"a": Extra(tls=Lazy("math:exp")), "b": Extra(tls=Lazy("math:sin")), "c": Extra()}
    monkeypatch.setattr(extension_module, "extras", lambda: found)
    with pytest.raises(ValueError, match="one extra must provide this: a and b"):
        extension(lambda extra: extra.tls)
    with pytest.raises(ValueError, match="one extra must provide this: none does"):
        extension(lambda extra: extra.media)


@pytest.mark.parametrize("name", NAMES)
def test_every_place_of_an_extra_exists(name: str) -> None:
    """A place is text, which no type checker reads."""
    for place in places(extras()[name]):
        if name in IMPORT_VLLM:
            module, _, attribute = place.partition(":")
            assert attribute in defined(module)
        else:
            assert Lazy[object](place).load() is not None, place


@pytest.mark.parametrize("name", NAMES)
def test_declaration_of_an_extra_is_cheap(name: str) -> None:
    """`explain` reads all of them: each imports the registry and nothing of its own."""
    module = importlib.import_module(f"lmi_vllm.extras.{name}")
    own = {value.__module__ for value in vars(module).values() if hasattr(value, "__module__")}
    assert {place for place in own if place.startswith("lmi_vllm")} <= {"lmi_vllm.extension"}
