"""The registry of extras: a folder is all it takes, and what it names exists."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmi_vllm
from lmi_vllm.extension import Extra, Lazy, extras

FOLDER = Path(lmi_vllm.__file__).parent / "extras"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def places(extra: Extra) -> Iterator[str]:
    """Yield every `module:name` that an extra names, those within its rows included."""
    yield from (f"{verb.module}:run" for verb in extra.verbs.values())
    lazy = (
        *extra.serve_variables,
        *extra.routes,
        *extra.listener_routes,
        *extra.before_custom_code,
    )
    yield from (one.place for one in lazy)
    yield from (rule.place for rule in extra.checkpoint_rules)
    for engine in extra.engines:
        yield from (engine.runs.place, engine.factory.place)
    yield from (one.place for one in (extra.around_start, extra.processes) if one is not None)


def test_every_folder_is_an_extra() -> None:
    """Nothing lists them by name."""
    assert list(extras()) == NAMES
    assert all(isinstance(extra, Extra) for extra in extras().values())


@pytest.mark.parametrize("name", NAMES)
def test_every_place_of_an_extra_exists(name: str) -> None:
    """A place is text, which no type checker reads."""
    for place in places(extras()[name]):
        assert Lazy[object](place).load() is not None, place


@pytest.mark.parametrize("name", NAMES)
def test_declaration_of_an_extra_is_cheap(name: str) -> None:
    """`explain` reads all of them: each imports the registry and nothing of its own."""
    module = importlib.import_module(f"lmi_vllm.extras.{name}")
    own = {value.__module__ for value in vars(module).values() if hasattr(value, "__module__")}
    assert {place for place in own if place.startswith("lmi_vllm")} <= {"lmi_vllm.extension"}


def test_package_without_extras_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole folder may go."""
    monkeypatch.setitem(sys.modules, "lmi_vllm.extras", None)
    assert extras.__wrapped__() == {}
