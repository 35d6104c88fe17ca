"""Settings that a feature brings: typed, with an origin, known by name, checked like the others."""

from collections.abc import Callable
from typing import ClassVar

import pytest
from pydantic import ValidationError

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import ENV, option, ours, variable
from lmi_vllm.config.settings import FeatureSettings, ServerSettings
from lmi_vllm.messages import Origin, OriginKind
from lmi_vllm.sources.table import Sources
from tests.support.assembled import load_settings


class PetSettings(FeatureSettings):
    """Settings of a feature that does not exist."""

    lmi_pets: int = variable(parse.positive_int, "How many.", default=2)

    def check(self, server: ServerSettings, sources: Sources, fail: Callable[[str], None]) -> None:
        """Every pet wants a place in the queue."""
        if self.lmi_pets > server.job_queue_size:
            fail("too many pets")


class PetOptions(FeatureSettings):
    """An option of the model and a setting of the server, of that feature."""

    section: ClassVar[str] = "Pets"

    pet_name: str | None = option(parse.plain_text, ours())
    pet_age: int = option(parse.count, ours(), default=1, aliases=("old_age",))
    pet_places: int | None = option(parse.count, ours(), written=(ENV,))


def pets(**environ: str) -> PetSettings:
    """The settings of the feature."""
    return load_settings(environ, kinds=(PetSettings,)).feature(PetSettings)


def test_extra_settings_are_typed_and_have_origins() -> None:
    """Written or by default, as the server's own."""
    assert pets().lmi_pets == 2
    found = pets(LMI_PETS="5")
    assert (found.lmi_pets, found.details["LMI_PETS"].origin) == (
        5,
        Origin(OriginKind.VARIABLE, "LMI_PETS"),
    )


def test_extra_variable_is_known_only_with_its_extra() -> None:
    """Without the feature its variable is an unknown name, and the settings are the defaults."""
    environ = {"LMI_PETS": "5"}
    assert load_settings(environ, kinds=(PetSettings,)).warnings == ()
    without = load_settings(environ, kinds=())
    assert "LMI_PETS is not known" in without.warnings[0]
    assert without.feature(PetSettings).lmi_pets == 2


def test_extra_settings_report_bad_values_and_conflicts() -> None:
    """Errors stand beside those of the server's settings."""
    (bad,) = load_settings({"LMI_PETS": "cat"}, kinds=(PetSettings,)).errors
    assert bad.startswith("LMI_PETS=cat cannot be used")
    environ = {"LMI_PETS": "5000"}
    assert "too many pets" in load_settings(environ, kinds=(PetSettings,)).errors


def test_options_of_an_extra_are_read_like_the_core_s() -> None:
    """By file and variable, with alias, origin and default; a value is read once."""
    environ = {"OPTION_PET_NAME": "Rex", "SERVING_PET_PLACES": "3"}
    settings = load_settings(environ, kinds=(PetOptions,))
    found = settings.feature(PetOptions)
    assert (found.pet_name, found.pet_places, found.pet_age) == ("Rex", 3, 1)
    assert settings.warnings == ()
    assert str(found.details["pet_name"].origin) == "OPTION_PET_NAME"
    assert "pet_name" in {setting.name for setting in settings.all_details()}
    (bad,) = load_settings({"OPTION_OLD_AGE": "x"}, kinds=(PetOptions,)).errors
    assert bad.startswith("option.old_age=x (OPTION_OLD_AGE) cannot be used")


def test_settings_are_frozen() -> None:
    """What was read once stays as it was."""
    settings = load_settings({})
    with pytest.raises(ValidationError, match="frozen"):
        settings.server.job_queue_size = 5  # type: ignore[misc]
