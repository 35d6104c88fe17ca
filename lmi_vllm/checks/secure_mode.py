"""Secure mode, as the start and the adapters ask for it.

A check returns sentences instead of raising, so that a refused start names every violation.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from lmi_vllm.config.settings import Settings


class SecurityChecks(Protocol):
    """Lists violations; none if secure mode is off."""

    def start_violations(
        self, settings: Settings, environ: Mapping[str, str], directory: Path | None
    ) -> tuple[str, ...]:
        """The violations of a start; `directory` is the model's, if there is one."""
        ...

    def adapter_violations(self, settings: Settings, folder: Path) -> tuple[str, ...]:
        """The violations in the folder of one adapter."""
        ...
