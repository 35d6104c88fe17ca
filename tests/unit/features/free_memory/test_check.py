"""Free memory is looked at when asked for, and the error names every number."""

from pathlib import Path

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.features.free_memory.check import MIB, free_gpu_memory, memory_errors
from lmi_vllm.host_memory import free_host_memory
from tests.support.assembled import load_settings


def settings(text: str, **environ: str) -> Settings:
    """Return the settings of a serving.properties and an environment."""
    properties = parse_properties(text, "serving.properties")
    return load_settings(environ, CommandLine(), properties)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the root of a machine with 1000 MiB available."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1024000 kB\n")
    return tmp_path


def limit(machine: Path, limit_text: str, usage_mib: int) -> None:
    """Put the machine into a control group."""
    folder = machine / "sys/fs/cgroup"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit_text + "\n")
    (folder / "memory.current").write_text(f"{usage_mib * MIB}\n")


def gpus(folder: Path, *free_mib: int) -> str:
    """Return a program that answers as nvidia-smi does."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo {free}\n" for free in free_mib))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("text", "is_enough"),
    [
        ("", True),
        ("required_memory_mb=500", True),
        ("required_memory_mb=501", False),
        ("required_memory_mb=900\nreserved_memory_mb=100", True),
        ("required_memory_mb=900\nreserved_memory_mb=101", False),
        ("reserved_memory_mb=1001", False),
    ],
)
def test_host_memory(machine: Path, text: str, is_enough: bool) -> None:
    """1000 MiB are there; 500 are reserved unless told otherwise."""
    assert (memory_errors(settings(text), machine) == []) == is_enough


def test_error_names_setting_origin_and_numbers(machine: Path) -> None:
    """All that is needed to decide what to change."""
    (error,) = memory_errors(settings("required_memory_mb=4000"), machine)
    assert "required_memory_mb" in error
    assert "serving.properties" in error
    assert "4000 MiB" in error
    assert "500 MiB to stay free" in error
    assert "of this machine 1000 MiB are available" in error


def test_error_names_the_container_whose_limit_counts(machine: Path) -> None:
    """The machine has enough; or the container's limit is above what the machine has left."""
    figures = "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"
    (machine / "proc/meminfo").write_text(figures)
    limit(machine, str(3 << 30), 200)
    (error,) = memory_errors(settings("required_memory_mb=4000"), machine)
    assert "of this container (its limit is 3.00 GiB) 2872 MiB are available" in error
    (machine / "proc/meminfo").write_text(figures.replace("8000000", "1000"))
    (error,) = memory_errors(settings("required_memory_mb=4000"), machine)
    assert "of this machine 0 MiB are available" in error


def test_reserve_may_come_from_the_environment(machine: Path) -> None:
    """SERVING_RESERVED_MEMORY_MB."""
    (error,) = memory_errors(settings("", SERVING_RESERVED_MEMORY_MB="2000"), machine)
    assert "SERVING_RESERVED_MEMORY_MB" in error


def test_control_group_limits_free_memory(machine: Path) -> None:
    """A container may have less than the machine has."""
    limit(machine, str(600 * MIB), 200)
    assert free_host_memory(machine) == 400 * MIB
    limit(machine, "max", 200)
    assert free_host_memory(machine) == 1000 * MIB


def test_every_gpu_is_looked_at(machine: Path) -> None:
    """The one without room is named."""
    smi = gpus(machine, 8000, 300)
    assert free_gpu_memory(smi) == [8000 * MIB, 300 * MIB]
    (error,) = memory_errors(settings("gpu.required_memory_mb=1000"), machine, smi)
    assert "GPU 1" in error
    assert memory_errors(settings("gpu.required_memory_mb=300"), machine, smi) == []


def test_gpu_memory_that_cannot_be_read_is_no_success(machine: Path) -> None:
    """The check was asked for: not being able to do it is an error."""
    (error,) = memory_errors(settings("gpu.required_memory_mb=1"), machine, str(machine / "none"))
    assert "no GPU says" in error


def test_memory_that_cannot_be_read_is_no_success(tmp_path: Path) -> None:
    """As for GPUs."""
    (error,) = memory_errors(settings("required_memory_mb=1"), tmp_path)
    assert "cannot be read" in error


@pytest.mark.parametrize("line", ["required_memory_mb=10", "reserved_memory_mb=10"])
def test_setting_is_accepted(line: str) -> None:
    """Known, without a warning."""
    found = settings(line)
    assert (found.errors, found.warnings) == ((), ())
