"""How long starts of this model took on this machine, kept beside compiled code for the next one.

One small file for each key of the compile cache, number of front ends and method of starting the
engine's process that is set:
`{"first_seconds": 38.2, "again_seconds": 4.1}`.
"""

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Final

from lmi_vllm.features.compile_cache.folders import OURS
from lmi_vllm.features.compile_cache.key import cache_key, key_parts
from lmi_vllm.inference.start_progress import StartProgress
from lmi_vllm.server.start_parts import PlannedStart

logger = logging.getLogger(__name__)

SUFFIX: Final = ".start-seconds.json"
SHORTEST: Final = 1.0  # seconds; who waits less needs no estimate
_LONGEST: Final = 7 * 86400.0  # what is above was not measured
_LARGEST: Final = 4096  # bytes of a file
_FIELDS: Final = ("first_seconds", "again_seconds")


class StartTimes:
    """The times of one model's starts: read before the engine starts, written once it is ready."""

    def __init__(self, path: Path, progress: StartProgress) -> None:
        self._path = path
        self._progress = progress

    async def read(self) -> None:
        """Let the start say what is left by the last one; a file that cannot be used is a line."""
        try:
            self._progress.expect(*await asyncio.to_thread(_read, self._path))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the seconds of earlier starts are not used: %s: %s", self._path, error)

    def write(self) -> "asyncio.Future[None] | None":
        """Keep the time of the start that ends; return what ends with the writing."""
        first, again = self._progress.measured
        if max(first, again) < SHORTEST:
            return None
        return asyncio.get_running_loop().run_in_executor(None, self._write, first, again)

    def _write(self, first: float, again: float) -> None:
        """Write the file as a whole: a process that reads it sees the old one or the new one."""
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        text = json.dumps(dict(zip(_FIELDS, (round(first, 1), round(again, 1)), strict=True)))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh.write_text(f"{text}\n", encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            logger.info("the seconds of this start are not kept: %s", error)


def start_times(start: PlannedStart, root: Path) -> StartTimes | None:
    """Return those of this start, in our folder below `root`; None if its key is not known.

    A scripted engine starts as fast as its script says: nothing is kept of it.
    """
    if start.engine == "scripted":
        return None
    environ = {**start.environ, **start.settings.environment_exports}
    try:
        parts = key_parts(start.model, start.arguments, environ)
    except OSError as error:
        logger.info("the seconds of this start are not kept: %s", error)
        return None
    # The time depends on these as well, and no compiled code does.
    if method := start.settings.server.vllm_worker_multiproc_method:
        parts = {**parts, "start_method": method}
    if (count := start.settings.server.lmi_frontend_processes) > 1:
        parts = {**parts, "front_ends": count}
    return StartTimes(root / OURS / f"{cache_key(parts)}{SUFFIX}", start.progress)


def _read(path: Path) -> tuple[float, float]:
    """Return the two times.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    with path.open("rb") as file:
        found = json.loads(file.read(_LARGEST))
    values: list[Any] = [found.get(name) for name in _FIELDS] if isinstance(found, dict) else [None]
    if not all(type(value) in (int, float) and 0 <= value <= _LONGEST for value in values):
        raise ValueError(f"{' and '.join(_FIELDS)} are not both seconds")
    first, again = values
    return float(first), float(again)
