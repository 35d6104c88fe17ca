"""A model's requirements.txt, installed by pip before the engine starts.

The model directory is only read: pip works from there, so that relative paths in the file hold, and
writes into the interpreter's own environment and its cache. Packages that the server stands on are
constrained: a line that would replace one is refused by name before pip runs.
"""

import asyncio
import contextlib
import importlib
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.parsers import java_true
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.requirements.constraints import Constraint, conflicts, installed_constraints
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.sources.table import Sources

logger = logging.getLogger(__name__)

REQUIREMENTS: Final = "requirements.txt"
WHEELS: Final = "requirements"
_SHOWN_LINES: Final = 12


class Requirements:
    """The packages of one model: of its directory, or of the one that is still to be fetched."""

    def __init__(self, model: ModelArtifacts, environ: Mapping[str, str], sources: Sources) -> None:
        self._model = model
        self._environ = environ
        self._sources = sources
        self._failure: str | None = None

    async def install_first(self) -> bool:
        """Install the requirements of a local directory; return whether a store's has some."""
        file = requirements_of(self._model.directory)
        if file is not None:
            await self._install(file)
            return False
        url = self._model.reference
        if not self._is_directory_fetched() or not self._sources.is_store(url):
            return False
        return (
            await asyncio.to_thread(self._sources.read_text, url, REQUIREMENTS, self._environ)
            is not None
        )

    async def install_fetched(self, model: ModelArtifacts) -> None:
        """Install the requirements of a model directory that was fetched."""
        file = requirements_of(model.directory) if self._is_directory_fetched() else None
        if file is not None:
            await self._install(file)

    def with_failure(self, reason: str) -> str:
        """Return why a start failed, with the failed installation that may explain it."""
        return with_failed_requirements(reason, self._failure)

    def _is_directory_fetched(self) -> bool:
        """Whether the model directory itself comes from a store."""
        return self._model.directory is None and not self._model.is_local

    async def _install(self, requirements: Path) -> None:
        constraints = await asyncio.to_thread(checked_constraints, requirements)
        self._failure = await install_requirements(
            requirements, self._environ, constraints=constraints
        )


def checked_constraints(requirements: Path) -> Mapping[str, Constraint]:
    """Return the constraints of this server, once the file agrees with them.

    Raises:
        ConfigurationError: lines would replace what the server stands on; the text names each.
    """
    constraints = installed_constraints()
    if found := conflicts(requirements, constraints):
        raise ConfigurationError([mask_urls(each) for each in found])
    return constraints


def faults(directory: Path | None) -> tuple[str, ...]:
    """Return a sentence for each line of a model directory's file that is refused."""
    file = requirements_of(directory)
    try:
        if file is not None:
            checked_constraints(file)
    except ConfigurationError as error:
        return error.problems
    return ()


def requirements_of(directory: Path | None) -> Path | None:
    """Return the requirements.txt of a model directory; None where it has none."""
    path = directory / REQUIREMENTS if directory is not None else None
    return path if path is not None and path.is_file() else None


def pip_arguments(requirements: Path, environ: Mapping[str, str], *, is_quiet: bool) -> list[str]:
    """Return the arguments of pip, without the interpreter.

    `requirements/` beside the file is a place to find wheels; offline it is the only one, and
    without it nothing but what the file itself names is installed.
    """
    words = ["install", "--disable-pip-version-check", "--no-input", "-r", str(requirements)]
    if is_quiet:
        words.insert(1, "--quiet")
    wheels = requirements.with_name(WHEELS)
    # Of pip's own environment, to which `option.env` of the model adds.
    is_offline = java_true(environ.get("DJL_OFFLINE", ""))
    if wheels.is_dir():
        words += ["--find-links", str(wheels)]
    if is_offline:
        words.append("--no-index" if wheels.is_dir() else "--no-deps")
    return words


async def install_requirements(
    requirements: Path,
    environ: Mapping[str, str],
    python: str = sys.executable,
    constraints: Mapping[str, Constraint] = MappingProxyType({}),
) -> str | None:
    """Install the file with the pip of `python`; return why that failed, None on success.

    A failure is logged as a warning with pip's last lines: the model may not need the packages.
    """
    is_quiet = not logger.isEnabledFor(logging.DEBUG)
    # -P: modules in the working directory, which is the model's, are not imported by pip.
    command = [python, "-P", "-m", "pip", *pip_arguments(requirements, environ, is_quiet=is_quiet)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="lmi-constraints-") as file:
        file.writelines(f"{each.line}\n" for each in constraints.values() if str(each.allowed))
        file.flush()
        return await _run_pip([*command, "-c", file.name], requirements, environ)


async def _run_pip(
    command: list[str], requirements: Path, environ: Mapping[str, str]
) -> str | None:
    logger.info("installing %s", requirements)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=requirements.parent,
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:  # the server is stopping
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    importlib.invalidate_caches()
    text = mask_urls(output.decode(errors="replace")).strip()
    if process.returncode == 0:
        logger.debug("pip: %s", text)
        return None
    shown = "\n".join(text.splitlines()[-_SHOWN_LINES:])
    logger.warning(
        "%s could not be installed, the start goes on without it; pip (exit code %s) said:\n%s",
        requirements,
        process.returncode,
        shown or "(nothing)",
    )
    return f"{requirements} could not be installed (pip's reason is in the log above)"


def with_failed_requirements(reason: str, failure: str | None) -> str:
    """Return `reason`, followed by `failure` if there is one."""
    return reason if failure is None else f"{reason}. Before that, {failure}"
