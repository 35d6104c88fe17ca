"""What this release does not act on is refused or named; nothing is ignored."""

from pathlib import Path

import pytest

from lmi_vllm.startup.options import ENVIRONMENT_SETTINGS, OPTIONS, SERVER_SETTINGS
from lmi_vllm.startup.properties import parse_properties
from lmi_vllm.startup.settings import Settings, load_settings
from lmi_vllm.startup.unavailable import NAMED, REFUSED, notices

# A value that asks for the feature, by name; anything else asks with "1".
VALUES = {
    "LMI_FRONTEND_PROCESSES": "2",
    "LMI_CACHE_URI": "s3://b/p",
    "error_rate_wlm": "5/PT1M",
    "error_rate_server": "5/PT1M",
    "error_rate_any": "5/PT1M",
}
SERVER_NAMES = {option.name for option in SERVER_SETTINGS}
WRITTEN = {option.name: option.written for option in SERVER_SETTINGS}
OPTION_NAMES = {option.name for option in OPTIONS}
VARIABLES = {option.name for option in ENVIRONMENT_SETTINGS}


def settings_with(name: str) -> tuple[Settings, dict[str, str]]:
    """Return settings in which the setting of that name is on, and the environment."""
    value = VALUES.get(name, "true" if name.startswith(("SAGE", "enable", "lmc", "log")) else "1")
    if name in VARIABLES:
        return load_settings({name: value}), {name: value}
    if "serving" in WRITTEN.get(name, ()):
        environ = {f"SERVING_{name.upper()}": value}
        return load_settings(environ), environ
    prefix = "option." if name in OPTION_NAMES else ""
    return load_settings({}, extra_properties=parse_properties(f"{prefix}{name}={value}")), {}


@pytest.mark.parametrize("name", sorted([*REFUSED, *NAMED]))
def test_notices_rows_name_known_settings(name: str) -> None:
    """A row for a name that nobody can set would be dead."""
    assert name in SERVER_NAMES | OPTION_NAMES | VARIABLES


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_notices_refuses_what_protects_or_changes_answers(name: str) -> None:
    """Such a setting ends the start, naming itself and its origin."""
    settings, environ = settings_with(name)
    said = notices(settings, None, environ)
    assert any(line.startswith(f"{name} (") for line in said.errors), said


@pytest.mark.parametrize("name", sorted(NAMED))
def test_notices_names_the_rest_in_a_warning(name: str) -> None:
    """Any other setting without effect is one warning that names it."""
    settings, environ = settings_with(name)
    said = notices(settings, None, environ)
    assert any(line.startswith(f"{name} (") for line in said.warnings), (said, settings.warnings)


def test_notices_are_silent_by_default(tmp_path: Path) -> None:
    """Nothing set, nothing said."""
    said = notices(load_settings({}), tmp_path, {})
    assert said.errors == ()
    assert said.warnings == ()
