"""Start vLLM's `AsyncLLM` the fast way that is safe on this platform (DECISIONS.md 8)."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lmi_vllm.engine.base import EngineClient
from lmi_vllm.engine.deaths import OomKills
from lmi_vllm.engine.open_files import check_open_files
from lmi_vllm.engine.vllm.async_llm import EngineSetup, LeadingAsyncLLM
from lmi_vllm.engine.vllm.beside import after_the_fork, import_front_end
from lmi_vllm.engine.vllm.cache_size import CacheSize
from lmi_vllm.engine.vllm.client_parts import EngineParts
from lmi_vllm.engine.vllm.configuration import (
    VllmArguments,
    adjusted_for_cpu,
    engine_args_from,
    engine_config,
    headless_workers,
    ray_problems,
    runs_on_cpu,
    worked_around,
)
from lmi_vllm.engine.vllm.engine_processes import noting_shared_memory
from lmi_vllm.engine.vllm.fork_server import (
    FORK,
    FORK_SERVER,
    SPAWN,
    EngineParents,
    ForkServer,
)
from lmi_vllm.engine.vllm.forks import START_METHOD, adopt_forked_engines
from lmi_vllm.engine.vllm.names import cached_tokenizer_from_config
from lmi_vllm.engine.vllm.processes import (
    CONFIGURED_METHOD,
    ERROR_FILE_VARIABLE,
    claim_children,
    keep_bars_out_of_the_log,
    read_root_cause,
    watch_root_causes,
)
from lmi_vllm.engine.vllm.signals import block_ending_signals
from lmi_vllm.engine.vllm.start_failures import (
    check_length,
    smaller_cache,
    start_error_of,
    with_argument,
)
from lmi_vllm.engine.vllm.start_method import can_become_unfit, why_spawned, why_unfit
from lmi_vllm.engine.vllm.tokenizer_trial import tried
from lmi_vllm.engine.vllm.workarounds import Scope, apply
from lmi_vllm.engine.vllm.workarounds.engine_context import without_forced_spawn
from lmi_vllm.engine.vllm.workarounds.not_finite import NOT_FINITE_COUNT
from lmi_vllm.errors import ConfigurationError, EngineStartError
from lmi_vllm.messages import EngineArguments, ServingProfile
from lmi_vllm.private_folders import SHARED_MEMORY, PrivateFolder, new_private_folder

logger = logging.getLogger(__name__)

ERRORS: Final = "engine-errors"  # the file of what processes log as exceptions
SOCKETS_FOLDER: Final = "VLLM_RPC_BASE_PATH"  # vLLM's, of its processes' sockets
NUMBA_THREADS: Final = "NUMBA_NUM_THREADS"


def check_arguments(arguments: EngineArguments) -> VllmArguments:
    """Return the arguments as the installed vLLM accepts them; called during the download.

    Raises:
        ConfigurationError: it does not (vLLM's message, with the argument and its origin), or Ray
            is asked for and not available.
    """
    try:
        # Any existing folder stands for the model, which may not be fetched yet.
        values = {**arguments.values, "model": os.curdir}
        read = VllmArguments.of(replace(arguments, values=values))
        engine_args_from(read.namespace)
    except (ValueError, TypeError) as error:
        raise ConfigurationError([with_argument(f"vLLM: {error}", arguments)]) from error
    if problems := ray_problems(arguments):
        raise ConfigurationError(problems)
    return read


def start_headless_workers(arguments: EngineArguments, *, is_cpu: bool) -> Any:
    """Start the workers of a node without an engine core; return what watches them."""
    if is_cpu:
        arguments = adjusted_for_cpu(arguments)
    namespace = VllmArguments.of(arguments).namespace
    config = engine_config(namespace, 1, 0, is_cpu=is_cpu, headless=True)
    _choose_start_method(arguments, None, is_cpu=is_cpu)
    return headless_workers(config)


def start_vllm(
    arguments: EngineArguments,
    profile: ServingProfile,
    parents: EngineParents,
    parts: EngineParts,
    clients: tuple[EngineClient, ...],
    checked: VllmArguments | None,
) -> LeadingAsyncLLM:
    """Start an engine; called on the thread of `parents`, so that the event loop stays free.

    Each of `clients` but the first can be another process. What was `checked` is not read again.

    Raises:
        ConfigurationError: the installed vLLM refuses an argument.
        EngineStartError: the engine did not come up; the text is the root cause.
    """
    check_open_files()
    (thread, fork_server), asked = parents, arguments
    with _engine_folder() as folder, starting(arguments, folder.path / ERRORS) as is_cpu:
        if is_cpu:
            arguments = adjusted_for_cpu(arguments)
        read = VllmArguments.of(arguments, checked)
        names = profile.served_names
        config = engine_config(read.namespace, len(clients) or 1, 0, is_cpu=is_cpu, names=names)
        model = config.model_config
        tried(str(model.tokenizer), partial(cached_tokenizer_from_config, model))
        method = _choose_start_method(arguments, fork_server, is_cpu=is_cpu)
        own_length = config.model_config.max_model_len
        oom_kills = _oom_kills(asked, folder.path / ERRORS, is_cpu=is_cpu)
        setup = EngineSetup(read, config, profile, thread, is_cpu, parts, oom_kills)
        with (
            _sockets_in(folder),
            noting_shared_memory(folder),
            _front_end_beside(config),
            _forking_elsewhere() if method == FORK_SERVER else contextlib.nullcontext(),
        ):
            llm = LeadingAsyncLLM(setup, clients, folder)
        fitted = config.model_config.max_model_len
        try:
            check_length(fitted, own_length, arguments.served_length)
            import_front_end()  # not yet where no process, or several, were forked
        except BaseException:
            llm.clean_up()
            llm.shutdown()
            raise
    if fork_server and not CONFIGURED_METHOD and can_become_unfit(arguments, is_cpu=is_cpu):
        fork_server.begin(why_unfit)
    if fitted < own_length:
        logger.warning(
            "max_model_len: the model's own length is %d, its KV cache fits %d; set max_model_len, "
            "or give the KV cache more memory",
            own_length,
            fitted,
        )
    return llm


@contextlib.contextmanager
def starting(arguments: EngineArguments, error_file: Path | None = None) -> Iterator[bool]:
    """Prepare for processes of vLLM's; yields whether they run on the CPU.

    They note their failures in a file, a temporary one unless it is given.

    Raises:
        EngineStartError: whatever went wrong meanwhile; the text is the root cause.
    """
    is_cpu = runs_on_cpu()
    compiled_code = worked_around(Scope.COMPILED_CODE, is_cpu=is_cpu)
    with contextlib.ExitStack() as prepared:
        if error_file is None:
            folder = prepared.enter_context(new_private_folder("lmi-vllm-start-"))
            error_file = folder.path / ERRORS
        oom_kills = _oom_kills(arguments, error_file, is_cpu=is_cpu)
        prepared.enter_context(_engine_environment(error_file, is_cpu=is_cpu))
        prepared.enter_context(compiled_code)
        prepared.enter_context(apply(Scope.ENGINE))
        try:
            yield is_cpu
        except (ConfigurationError, EngineStartError):
            raise
        except Exception as error:
            cause, cache = read_root_cause(error_file), CacheSize.read(error_file)
            raise start_error_of(error, cause, arguments, oom_kills, os.environ, cache) from error


def _oom_kills(arguments: EngineArguments, error_file: Path, *, is_cpu: bool) -> OomKills:
    """Count from now on; what helps depends on the size of the cache, which is known later."""
    return OomKills(helps=lambda: smaller_cache(arguments, error_file) if is_cpu else "")


def _front_end_beside(config: Any) -> contextlib.AbstractContextManager[None]:
    """Import what serves requests beside the engine core, if there is one alone."""
    if config.parallel_config.data_parallel_size > 1:
        return contextlib.nullcontext()
    return after_the_fork(import_front_end)


@contextlib.contextmanager
def _engine_folder() -> Iterator[PrivateFolder]:
    """Make the folder that is the engine's, and is removed with it or where the body fails."""
    folder = new_private_folder("lmi-vllm-engine-", notes_in=SHARED_MEMORY)
    try:
        yield folder
    except BaseException:
        folder.remove()
        raise


@contextlib.contextmanager
def _sockets_in(folder: PrivateFolder) -> Iterator[None]:
    """Let vLLM make its sockets in a folder of the engine; else each start leaves three files.

    Not if the user names a folder. One in shared memory takes its place where TMPDIR is too long
    for the path of a socket.
    """
    sockets = folder.for_sockets
    if SOCKETS_FOLDER in os.environ or sockets is None:
        yield
        return
    os.environ[SOCKETS_FOLDER] = str(sockets)
    try:
        yield
    finally:
        del os.environ[SOCKETS_FOLDER]


def _choose_start_method(
    arguments: EngineArguments, fork_server: ForkServer | None, *, is_cpu: bool
) -> str:
    """On Linux, fork the engine from here, where everything is imported, or from the fork server.

    Else spawn it. Returns what was chosen. create_engine_config() has just set "spawn" on a CPU.
    What the operator set counts: vLLM itself spawns where CUDA is initialised, whatever is set.
    """
    if sys.platform != "linux":
        return os.environ.get(START_METHOD, SPAWN)
    reason = why_spawned(arguments, is_cpu=is_cpu)
    method = CONFIGURED_METHOD or (SPAWN if reason else FORK)
    if method == FORK_SERVER and not (fork_server and fork_server.wait()):
        method = SPAWN if reason or fork_server is None else FORK
        logger.warning("%s=%s: %s instead", START_METHOD, FORK_SERVER, method)
    elif CONFIGURED_METHOD:
        logger.info("the engine's process: %s, set by %s", method, START_METHOD)
    elif reason and fork_server and fork_server.is_ready:
        method = FORK_SERVER
        logger.info("the engine's process is forked by another one than the server: %s", reason)
    elif reason:
        logger.info("the engine's process is spawned and imports vLLM again: %s", reason)
    # The engine core that is forked forks its workers.
    os.environ[START_METHOD] = FORK if method == FORK_SERVER else method
    block_ending_signals(will_spawn=method != FORK)
    adopt_forked_engines()
    return method


@contextlib.contextmanager
def _forking_elsewhere() -> Iterator[None]:
    """Let vLLM take the processes of an engine from the fork server."""
    with apply(Scope.FORK_SERVER), without_forced_spawn():
        yield


def why_front_ends_are_spawned() -> str:
    """Return why front ends cannot be forked from this process; empty if they can.

    On a CPU, too: unlike the engine they use the libraries whose threads are looked for.
    """
    if CONFIGURED_METHOD not in {None, "fork"}:
        return f"{START_METHOD}={CONFIGURED_METHOD}"
    if logging.getLogger("vllm").handlers:  # VLLM_CONFIGURE_LOGGING=1, or a configuration's
        return "vLLM's log has handlers of its own"
    return why_unfit()


@contextlib.contextmanager
def _engine_environment(error_file: Path, *, is_cpu: bool) -> Iterator[None]:
    """Pass the log format and other settings to engine processes in the environment.

    vLLM looks for n-gram drafts with one thread of numba. With more in its pool, each step waits
    for threads that have nothing to do (DECISIONS.md 111). Where an operator's code has imported
    numba here, it is left alone: it refuses another number once its threads run.
    """
    claim_children()
    keep_bars_out_of_the_log()
    passed = {ERROR_FILE_VARIABLE: str(error_file)}
    if NUMBA_THREADS not in os.environ and "numba" not in sys.modules:
        passed[NUMBA_THREADS] = "1"
    os.environ.update(passed)
    os.environ.setdefault(NOT_FINITE_COUNT, "1")
    if is_cpu:
        # Lets the CPU platform keep the `uni` executor; the engine core is still a child.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    stop_watching = watch_root_causes(str(error_file))
    try:
        yield
    finally:
        stop_watching()
        for name in passed:
            os.environ.pop(name, None)
