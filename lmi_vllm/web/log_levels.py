"""Names of log levels."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Upstream's level names (startup.md 10) in ours.
LOG_LEVELS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "trace": logging.DEBUG,
        "debug": logging.DEBUG,
        "info": logging.INFO,
        "warn": logging.WARNING,
        "error": logging.ERROR,
        "fatal": logging.CRITICAL,
        "off": logging.CRITICAL + 1,
    }
)
