"""A grammar tried in a process that can end: compiled, then walked as an engine would walk it.

What each token cost is judged by `grammar_costs`. This module imports no vLLM.
"""

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import xgrammar

from lmi_vllm.engine.vllm.processes import close_internet_sockets, end_with_parent
from lmi_vllm.engine.vllm.workarounds.grammar_costs import STEP_SECONDS, check_costs

# A child's copy of us may grow by so much; beyond, its allocations fail and it says so.
MEMORY_BYTES: Final = 4 << 30
WALK_SECONDS: Final = 0.5  # per walk, for a harmless grammar over a large vocabulary
PASSED: Final = b"\0"
_ANSWER_BYTES: Final = 2000


def fork_trial(attempt: Callable[[], bytes]) -> tuple[int, int]:
    """Return the child that makes the attempt and the pipe on which it will answer."""
    parent = os.getpid()
    readable, writable = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writable)
        return pid, readable
    try:  # in the child, a copy of this thread alone
        _become_child(parent)
        answer = attempt()
    except BaseException as error:  # noqa: BLE001 (it must end here, whatever it was)
        answer = str(error).encode("utf-8", "replace")[:_ANSWER_BYTES] or b"refused"
    with contextlib.suppress(OSError):
        os.write(writable, answer)
    os._exit(0)


async def wait_for_verdict(pid: int, pipe: int, seconds: float) -> str:
    """Return why the child refuses, or an empty text; it ends with this, cancelled or not."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pipe, readable.set)
    try:
        async with asyncio.timeout(seconds):
            await readable.wait()
        answer = os.read(pipe, _ANSWER_BYTES)
    except TimeoutError:
        answer = None
    finally:
        loop.remove_reader(pipe)
        gone = end_trial(pid, pipe)
    await gone
    if answer == PASSED:
        return ""
    start = "The schema, regular expression or grammar is refused: "
    if answer is None:
        return f"{start}it does not compile within {seconds:g} s (LMI_GRAMMAR_TIMEOUT)"
    return start + (answer.decode("utf-8", "replace") or "compiling it takes too much memory")


def end_trial(pid: int, pipe: int) -> "asyncio.Future[None]":
    """End the child, wherever it is; what is returned is done when its memory is free."""
    os.close(pipe)
    os.kill(pid, signal.SIGKILL)  # it has not been waited for: the number is still its own
    return asyncio.get_running_loop().run_in_executor(None, _reap, pid)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _become_child(parent: int) -> None:
    """Hold nothing of the server's, end with it, and have bounded memory."""
    os.setpgid(0, 0)
    os.nice(5)  # those who wait for tokens come first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    close_internet_sockets()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def walk(matcher: Any, lengths: Any, steps: int) -> None:
    """Ask for tokens as the engine would: what each costs may grow with the answer.

    Walks take the same token as long as they may (what a weak model does), the longest one (what
    costs most), and random ones. `lengths` are those of the vocabulary's tokens, in bytes.

    Raises:
        ValueError: one token cost too much, or would before the answer ends.
    """
    walks: list[Callable[[Any], Any]] = [_Persistent(), lambda ids: ids[lengths[ids].argmax()]]
    walks += [random.Random(seed).choice for seed in (1, 2)]
    for choose in walks:
        costs, is_whole = _walk_once(matcher, len(lengths), steps, choose)
        check_costs(costs, steps, is_whole=is_whole)


@dataclass(slots=True)
class _Persistent:
    """Chooses what it chose before, and otherwise anything."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    token: int = -1

    def __call__(self, allowed: Any) -> Any:
        if self.token not in allowed:
            self.token = self.chance.choice(allowed)
        return self.token


def _walk_once(
    matcher: Any, vocab_size: int, steps: int, choose: Callable[[Any], Any]
) -> tuple[list[float], bool]:
    """Return the processor seconds of each token, and whether the walk came to an end."""
    matcher.reset()
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    ends = np.array(matcher.stop_token_ids)
    deadline = time.thread_time() + WALK_SECONDS
    costs: list[float] = []
    while len(costs) < steps and not matcher.is_terminated():
        if time.thread_time() > deadline or (costs and costs[-1] > STEP_SECONDS):
            return costs, False
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        cost = time.thread_time() - began
        allowed = np.setdiff1d(_allowed(mask, vocab_size), ends, assume_unique=True)
        if not len(allowed):
            break
        token = int(choose(allowed))
        began = time.thread_time()
        matcher.accept_token(token)
        costs.append(cost + time.thread_time() - began)
    return costs, True


def _allowed(mask: Any, vocab_size: int) -> Any:
    """Return the ids of the tokens that may come next."""
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size])
