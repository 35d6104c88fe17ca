"""Settings that an extra brings: typed, with an origin, known by name, checked like the others."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

from lmi_vllm.config import parsers as parse
from lmi_vllm.config import unknown_names
from lmi_vllm.config.load import load_settings
from lmi_vllm.config.options import ENVIRONMENT_SETTINGS, OPTIONS, SERVER_SETTINGS
from lmi_vllm.config.options.row import ENV, option, ours, variable
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import ExtraSettings, ServerSettings
from lmi_vllm.messages import Origin, OriginKind


class PetSettings(ExtraSettings):
    """Settings of an extra that does not exist."""

    lmi_pets: int = variable(parse.positive_int, "How many.", default=2)

    def check(self, server: ServerSettings, fail: Callable[[str], None]) -> None:
        """Every pet wants a place in the queue."""
        if self.lmi_pets > server.job_queue_size:
            fail("too many pets")


class PetOptions(ExtraSettings):
    """An option of the model and a setting of the server, of that extra."""

    section: ClassVar[str] = "Pets"

    pet_name: str | None = option(parse.plain_text, ours())
    pet_age: int = option(parse.count, ours(), default=1, aliases=("old_age",))
    pet_places: int | None = option(parse.count, ours(), written=(ENV,))


def pets(**environ: str) -> PetSettings:
    """The settings of the extra."""
    return load_settings(environ, kinds=(PetSettings,)).extra(PetSettings)


def test_extra_settings_are_typed_and_have_origins() -> None:
    """Written or by default, as the server's own."""
    assert pets().lmi_pets == 2
    found = pets(LMI_PETS="5")
    assert (found.lmi_pets, found.details["LMI_PETS"].origin) == (
        5,
        Origin(OriginKind.VARIABLE, "LMI_PETS"),
    )


def test_extra_variable_is_known_only_with_its_extra() -> None:
    """Without the extra its variable is an unknown name, and the settings are the defaults."""
    environ = {"LMI_PETS": "5"}
    assert load_settings(environ, kinds=(PetSettings,)).warnings == ()
    without = load_settings(environ, kinds=())
    assert "LMI_PETS is not known" in without.warnings[0]
    assert without.extra(PetSettings).lmi_pets == 2


def test_extra_settings_report_bad_values_and_conflicts() -> None:
    """Errors stand beside those of the server's settings."""
    (bad,) = load_settings({"LMI_PETS": "cat"}, kinds=(PetSettings,)).errors
    assert bad.startswith("LMI_PETS=cat (LMI_PETS) cannot be used")
    environ = {"LMI_PETS": "5000"}
    assert "too many pets" in load_settings(environ, kinds=(PetSettings,)).errors


MISSING = {
    "option": ({"OPTION_SESSIONS_PATH": "/x"}, "OPTION_SESSIONS_PATH", "sessions"),
    "setting": ({"SERVING_CACHE_BATCH": "2"}, "SERVING_CACHE_BATCH", "deferred"),
    "variable": ({"LMI_CACHE_URI": "/x"}, "LMI_CACHE_URI", "compile_cache"),
    "foreign variable": ({"OTEL_SERVICE_NAME": "x"}, "OTEL_SERVICE_NAME", "traces"),
}


@pytest.mark.parametrize(("environ", "name", "extra"), MISSING.values(), ids=MISSING)
def test_name_of_a_missing_extra_says_so(environ: dict[str, str], name: str, extra: str) -> None:
    """What an extra would read is named in a warning; in strict mode it is an error."""
    reason = f"{name} has no effect: it needs the extra {extra}, which is not installed"
    assert load_settings(environ, kinds=()).warnings == (reason,)
    assert load_settings({**environ, "LMI_STRICT": "true"}, kinds=()).errors == (reason,)


@pytest.mark.parametrize("folder_file", ["serving.properties", "config.properties"])
def test_key_of_a_missing_extra_says_so(tmp_path: Path, folder_file: str) -> None:
    """In a file as well."""
    key = "option.sessions_path" if folder_file == "serving.properties" else "cache_batch"
    (tmp_path / folder_file).write_text(f"{key}=2\n")
    line = CommandLine(model_store=str(tmp_path), config_file=str(tmp_path / "config.properties"))
    settings = load_settings({}, line, kinds=())
    assert any(f"{key} (" in text and "needs the extra" in text for text in settings.warnings)


def test_rows_of_the_core_that_an_extra_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core knows some, and says what is missing of all."""
    environ = {"LMI_FRONTEND_PROCESSES": "4", "OPTION_LMCACHE_CONFIG_FILE": "x.yaml"}
    assert set(unknown_names.READ_BY_EXTRAS) <= {
        row.name for row in (*OPTIONS, *SERVER_SETTINGS, *ENVIRONMENT_SETTINGS)
    }
    monkeypatch.setattr(unknown_names, "extras", dict)
    settings = load_settings(environ, kinds=())
    for name, extra in (("LMI_FRONTEND_PROCESSES", "front_ends"), ("LMCACHE_CONFIG", "lmcache")):
        needed = f"needs the extra {extra}, which is not installed"
        assert [text for text in settings.warnings if name in text and needed in text]
    assert len(load_settings({**environ, "LMI_STRICT": "true"}, kinds=()).errors) == 2
    assert load_settings({}, kinds=()).warnings == ()


@pytest.mark.parametrize("place", ["/var/state.json", "file:///state.json", "s3://b/key"])
def test_state_of_adapters_is_an_extra_s(place: str) -> None:
    """Wherever it is, it is not ignored without a message."""
    (warning,) = load_settings({"OPTION_ADAPTERS_STATE": place}, kinds=()).warnings
    assert "needs the extra adapters_state, which is not installed" in warning


def test_options_of_an_extra_are_read_like_the_core_s() -> None:
    """By file and variable, with alias, origin and default; a value is read once."""
    environ = {"OPTION_PET_NAME": "Rex", "SERVING_PET_PLACES": "3"}
    settings = load_settings(environ, kinds=(PetOptions,))
    found = settings.extra(PetOptions)
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
