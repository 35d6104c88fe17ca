"""Settings of the specification without effect in this release: refused or named, never ignored.

A row leaves this table when its feature arrives. What protects somebody or
changes answers (custom code) refuses the start; the rest is one warning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.startup.resolved import Setting, Settings

_INACTIVE: Final = (None, "", False, 0, "off", "auto", "none")


@dataclass(frozen=True, slots=True)
class Notices:
    """What to say about settings without effect: errors end the start."""

    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


REFUSED: Final[Mapping[str, str]] = MappingProxyType({})
NAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "LMI_CACHE_URI": "compile caches are not kept between containers yet",
    }
)


def reason_without_effect(setting: Setting) -> str | None:
    """Return why this release does not act on a setting; None where it does, or it is off."""
    if not setting.is_set:
        return None
    if not _is_active(setting.name, setting.value):
        return None
    if setting.name in REFUSED:
        return f"{REFUSED[setting.name]}; serve refuses to start"
    return NAMED.get(setting.name)


def notices(settings: Settings, directory: Path | None, environ: Mapping[str, str]) -> Notices:
    """Return what a start says about each setting, and the model directory, without effect yet."""
    errors: list[str] = []
    warnings: list[str] = []
    for setting in (*settings.options.values(), *settings.server.values()):
        reason = reason_without_effect(setting)
        if reason is not None:
            is_named = setting.name in NAMED
            (warnings if is_named else errors).append(
                f"{setting.name} ({setting.origin}): {reason}"
            )
    return Notices(tuple(warnings), tuple(errors))


def _is_active(name: str, value: object) -> bool:
    return value not in _INACTIVE
