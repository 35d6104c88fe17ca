"""Takes the place of the front end's program: says what it was begun with, then ends."""

import asyncio
import json
import logging
import os
import random
import signal
import socket
from pathlib import Path
from typing import NoReturn

from lmi_vllm.telemetry.log_handler import QueuedHandler

logger = logging.getLogger(__name__)


def run_front_end(descriptor: int) -> NoReturn:
    """Report over the channel, log a line, and end with 7 once the channel is closed."""
    logging.basicConfig(level=logging.INFO, handlers=[QueuedHandler(2)], force=True)
    with socket.socket(fileno=descriptor) as channel:
        logger.info("begun")
        channel.sendall(json.dumps(state()).encode() + b"\n")
        channel.recv(1)
    os._exit(7)


def state() -> dict[str, object]:
    """Return what a process has from the one that forked it."""
    try:
        asyncio.get_running_loop()
        is_in_loop = True
    except RuntimeError:
        is_in_loop = False
    return {
        "parent": os.getppid(),
        "session": os.getsid(0),
        "files": {path.name: str(path.readlink()) for path in open_files()},
        "handlers": [
            number for number in signal.valid_signals() if callable(signal.getsignal(number))
        ],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "ignored": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        "wakeup": signal.set_wakeup_fd(-1),
        "loop": is_in_loop,
        "drawn": random.random(),
    }


def open_files() -> list[Path]:
    """Return the entries of the process's descriptors that are open now."""
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
