"""Secure mode: extras list the violations; without the extra everything is refused.

A check returns sentences instead of raising, so that a refused start names every violation.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.config.settings import Settings
from lmi_vllm.extension import extensions, extras

SWITCH: Final = "SAGEMAKER_SECURE_MODE"
_EXTRA: Final = "secure_mode"
_NO_CHECKS: Final = f"{SWITCH} is on, and needs the extra {_EXTRA}, which is not installed"


# Violations of a start (the path is the model directory, if there is one); none if secure mode is
# off.
StartCheck = Callable[[Settings, Mapping[str, str], Path | None], tuple[str, ...]]
# Violations in the folder of one adapter.
AdapterCheck = Callable[[Settings, Path], tuple[str, ...]]


def start_violations(
    settings: Settings, environ: Mapping[str, str], directory: Path | None
) -> tuple[str, ...]:
    """The violations of a start, from all extras."""
    checks = extensions(lambda extra: extra.start_check)
    texts = tuple(text for check in checks for text in check(settings, environ, directory))
    return texts or _unchecked(settings)


def adapter_violations(settings: Settings, folder: Path) -> tuple[str, ...]:
    """The violations in the folder of one adapter, from all extras."""
    checks = extensions(lambda extra: extra.adapter_check)
    texts = tuple(text for check in checks for text in check(settings, folder))
    return texts or _unchecked(settings)


def _unchecked(settings: Settings) -> tuple[str, ...]:
    """The one violation if secure mode is on and its extra is not installed."""
    return (_NO_CHECKS,) if settings.server.sagemaker_secure_mode and _EXTRA not in extras() else ()
