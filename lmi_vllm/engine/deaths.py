"""How a process of the engine has ended, in words: its signal or exit code, or lack of memory."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lmi_vllm.host_memory import container_memory

ENGINE_DIED: Final = "the engine process died"
FORK_SERVER_ENDED: Final = "the fork server ended, and the engine with it"
# Files of control groups, versions 2 and 1, with a line `oom_kill COUNT` (Linux 4.13 and later).
_COUNTERS: Final = ("memory.events", "memory/memory.oom_control")
_GIB: Final = 1 << 30


def how_ended(code: int | None) -> str:
    """Return how a process ended, from its exit code as Python has it; empty if that is unknown."""
    if code is None:
        return ""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal without a name
        return f"killed by signal {-code}"


def ended_so(what: str, code: int | None, oom_kills: "OomKills") -> str:
    """Return what happened, with how the process ended, as far as that is known."""
    may_be_memory = code is None or code == -signal.SIGKILL
    details = filter(None, (how_ended(code), oom_kills.words() if may_be_memory else ""))
    return ": ".join(filter(None, (what, ", ".join(details))))


class OomKills:
    """Counts the container's processes that the kernel kills for lack of memory, from now on."""

    def __init__(self, root: Path = Path("/"), helps: Callable[[], str] = lambda: "") -> None:
        """Begin to count; `helps` returns what helps beside more memory, if something does."""
        self._root = root
        self._helps = helps
        self._before = self._count()

    def words(self) -> str:
        """Return that there were some, with what to do; empty without one."""
        if (count := self._count() - self._before) <= 0:
            return ""
        container, helps = container_memory(self._root), self._helps()
        limit = "" if container is None else f" than its limit of {container.limit / _GIB:.2f} GiB"
        otherwise = f", or {helps}" if helps else ""
        return (
            f"the kernel's OOM killer ended {count} of the container's processes: give it more "
            f"memory{limit}{otherwise}"
        )

    def _count(self) -> int:
        folder = self._root / "sys/fs/cgroup"
        return max(map(_oom_kills, self._files(folder)), default=0)

    def _files(self, folder: Path) -> list[Path]:
        """The counters of our own group, and of the container's, the root that we see."""
        found = [folder / name for name in _COUNTERS]
        try:
            lines = (self._root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return found
        for number, controllers, path in (line.split(":", 2) for line in lines):
            own = path.lstrip("/")
            if number == "0":
                found.append(folder / own / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(folder / "memory" / own / "memory.oom_control")
        return found


def _oom_kills(file: Path) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
