"""Secure mode: extras list the violations.

A check returns sentences instead of raising, so that a refused start names every violation.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from lmi_vllm.config.settings import Settings
from lmi_vllm.extension import extensions

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
    return tuple(text for check in checks for text in check(settings, environ, directory))


def adapter_violations(settings: Settings, folder: Path) -> tuple[str, ...]:
    """The violations in the folder of one adapter, from all extras."""
    checks = extensions(lambda extra: extra.adapter_check)
    return tuple(text for check in checks for text in check(settings, folder))
