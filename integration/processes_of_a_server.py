"""The processes of a server with several front ends, by what they are called."""

import contextlib
from typing import Final

import psutil

from lmi_vllm.engine.vllm.forks import TITLE
from lmi_vllm.features.front_ends.template import (
    FRONT_END_NAME,
    PROGRAM,
    TEMPLATE_NAME,
)

TEMPLATE: Final = TITLE + TEMPLATE_NAME
FRONT_END: Final = TITLE + FRONT_END_NAME  # of one that was forked


def further_front_ends(server: int) -> list[psutil.Process]:
    """Return the front ends beside the first process, forked or spawned."""
    return [one for one in _below(server) if {FRONT_END, PROGRAM} & {*_words(one)}]


def template_of(server: int) -> psutil.Process | None:
    """Return the process that forks them, if there is one."""
    return next((one for one in _below(server) if TEMPLATE in _words(one)), None)


def is_of_the_front(process: psutil.Process) -> bool:
    """Whether it is a front end or their template, and no process of the engine."""
    return bool({FRONT_END, PROGRAM, TEMPLATE} & {*_words(process)})


def _below(server: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(server).children(recursive=True)
    return []


def _words(process: psutil.Process) -> list[str]:
    """Return its command line; a forked process keeps its server's until it has its own."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return [word.strip() for word in process.cmdline()]
    return []
