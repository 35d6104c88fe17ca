"""The composition root: every feature is called, once and in a written order."""

import importlib
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import pytest

import lmi_vllm
from lmi_vllm.assembly import CONFIGURES, SERVES
from lmi_vllm.cli import VERBS
from lmi_vllm.features.hub.source import HuggingFaceHub
from lmi_vllm.translate.configuration import ConfigurationBuilder

FOLDER = Path(lmi_vllm.__file__).parent / "features"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def module_of(name: str) -> ModuleType:
    """Return the package of that feature."""
    return importlib.import_module(f"lmi_vllm.features.{name}")


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
    """An entry point, a verb; or it is the entry point of images or of Ray Serve."""
    verbs = {verb.module.split(".")[2] for verb in VERBS.values() if ".features." in verb.module}
    assert {*NAMES} - {*named(CONFIGURES), *named(SERVES)} == verbs | {"image", "ray_serve"}


@pytest.mark.parametrize("name", NAMES)
def test_declaration_of_an_extra_is_cheap(name: str) -> None:
    """`explain` reads all of them: each imports nothing of its own until it is called."""
    module = module_of(name)
    own = {value.__module__ for value in vars(module).values() if hasattr(value, "__module__")}
    assert {place for place in own if place.startswith("lmi_vllm")} <= {
        module.__name__,
    }


def test_second_hub_is_refused_by_both_names() -> None:
    """A slot takes one value."""
    builder = ConfigurationBuilder()
    builder.hub.fill(HuggingFaceHub())
    with pytest.raises(ValueError, match=r"hub: lmi_vllm.*HuggingFaceHub and builtins.object both"):
        builder.hub.fill(object())  # type: ignore[arg-type]


def test_feature_that_is_missing_is_named() -> None:
    """Not only where something first asks for it."""
    with pytest.raises(ValueError, match="hub: nothing provides it"):
        ConfigurationBuilder().build()
