"""The files that an engine opens while it starts: without them ZeroMQ ends the server's process.

It opens pipes, sockets and event counters where Python does not see a failure. It aborts then, and
no line of the log says why.
"""

import resource
from pathlib import Path
from typing import Final

from lmi_vllm.errors import EngineStartError

NEEDED: Final = 64  # an engine opens about 30 in the server's process, and its first requests more
_OPEN: Final = Path("/proc/self/fd")


def check_open_files() -> None:
    """Check that enough files can still be opened.

    Raises:
        EngineStartError: they are not; the text has the limit.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or not _OPEN.is_dir():
        return
    try:
        used = sum(1 for _ in _OPEN.iterdir())
    except OSError:  # not even this one could be opened
        used = most
    if most - used < NEEDED:
        raise EngineStartError(
            f"the engine is not started: of {most} files that this process may have open, {used} "
            f"are (connections of clients, too), and an engine needs {NEEDED}: raise the limit "
            "(ulimit -n, docker run --ulimit nofile=65536), or lower SERVING_JOB_QUEUE_SIZE"
        )
