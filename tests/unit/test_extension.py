"""The registry of extras: one list in an order that means something, and what it names exists."""

import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

import lmi_vllm
from lmi_vllm import extension as extension_module
from lmi_vllm.assembly import CONFIGURES, SERVES
from lmi_vllm.cli import VERBS
from lmi_vllm.extension import ORDER, Extra, Lazy, extension, extras
from lmi_vllm.extras.hub.source import HuggingFaceHub
from lmi_vllm.translate.configuration import ConfigurationBuilder
from tests.unit.test_imports_exist import defined

FOLDER = Path(lmi_vllm.__file__).parent / "extras"
IMPORT_VLLM = {"token_lane"}  # ten seconds
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
WITH_EXTRA = sorted(ORDER)


def module_of(name: str) -> ModuleType:
    """Return the package of that feature."""
    return importlib.import_module(f"lmi_vllm.extras.{name}")


def places(value: object) -> Iterator[str]:
    """Yield every place that an extra names, those within its rows included."""
    if isinstance(value, Lazy):
        yield value.place
    elif isinstance(value, tuple):
        yield from chain(*map(places, value))
    elif isinstance(value, Mapping):
        yield from chain(*map(places, value.values()))
    elif is_dataclass(value):
        yield from chain(*(places(getattr(value, field.name)) for field in fields(value)))


def named(features: Collection[object]) -> list[str]:
    """Return the names of these packages."""
    return [vars(feature)["__name__"].rpartition(".")[2] for feature in features]


@pytest.mark.parametrize(
    ("entry", "order"), [("configure", CONFIGURES), ("serve", SERVES)], ids=["configure", "serve"]
)
def test_every_entry_point_is_called_once(entry: str, order: Collection[object]) -> None:
    """At the place in the order that was chosen for it."""
    assert sorted(named(order)) == [name for name in NAMES if hasattr(module_of(name), entry)]


def test_every_folder_has_a_use() -> None:
    """An entry point, a part of the engine, a verb; or it is the entry point of images."""
    assert list(extras()) == list(ORDER)
    verbs = {verb.module.split(".")[2] for verb in VERBS.values() if ".extras." in verb.module}
    assert {*NAMES} - {*named(CONFIGURES), *named(SERVES), *ORDER} == verbs | {"image"}


def test_second_provider_of_one_thing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both names: none of them wins without a message."""
    found = {"a": Extra(media=Lazy("math:exp")), "b": Extra(media=Lazy("math:sin")), "c": Extra()}
    monkeypatch.setattr(extension_module, "extras", lambda: found)
    with pytest.raises(ValueError, match="one extra must provide this: a and b"):
        extension(lambda extra: extra.media)
    with pytest.raises(ValueError, match="one extra must provide this: none does"):
        extension(lambda extra: extra.token_lane)


@pytest.mark.parametrize("name", WITH_EXTRA)
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
    module = module_of(name)
    own = {value.__module__ for value in vars(module).values() if hasattr(value, "__module__")}
    assert {place for place in own if place.startswith("lmi_vllm")} <= {
        "lmi_vllm.extension",
        module.__name__,
    }


def test_second_hub_is_refused_by_both_names() -> None:
    """A slot takes one value."""
    builder = ConfigurationBuilder()
    builder.hub(HuggingFaceHub())
    with pytest.raises(ValueError, match=r"hub: lmi_vllm.*HuggingFaceHub and builtins.object both"):
        builder.hub(object())  # type: ignore[arg-type]


def test_feature_that_is_missing_is_named() -> None:
    """Not only where something first asks for it."""
    with pytest.raises(ValueError, match="hub: nothing provides it"):
        ConfigurationBuilder().build()
