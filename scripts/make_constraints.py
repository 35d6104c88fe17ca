#!/usr/bin/env python3
"""Resolve every transitive version of each extra into config/constraints/, with `uv`.

Two files an extra: `<extra>.txt` is for `pip install -c` (versions only), `<extra>-hashes.txt` for
`pip install --no-deps --require-hashes -r` (the Dockerfiles). What a file already says is kept as
long as it fits; `--upgrade` takes the newest. Needs the package index, and torch's CPU build where
uv looks: UV_FIND_LINKS or UV_INDEX=https://download.pytorch.org/whl/cpu.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CONSTRAINTS: Final = ROOT / "config" / "constraints"
# The machine the versions are chosen for and tested on; scripts/setup.py reads it from line 2.
PYTHON_VERSION: Final = "3.11"
PLATFORM: Final = "linux x86_64"
UV_PLATFORM: Final = "x86_64-manylinux_2_36"  # Debian 12's glibc, as in the images
# PyPI has only CUDA builds of these: beside a CPU torch they break imports, so images go without.
# Of torchvision, too, but the server uses it without its compiled operators.
UNFIT_ON_CPU: Final = ("torchaudio", "torchcodec")
# What LMCache bounds below the versions that the other files share.
BOUND_BY_LMCACHE: Final = ("prometheus-client",)
# Extra -> (extras resolved together, files whose versions it shares; dev lists only what it adds).
PLAN: Final = {
    "base": ((), ()),
    "otel": (("otel",), ("base",)),
    "cpu": (("cpu", "clouds"), ("base",)),
    "cuda": (("cuda", "lmcache", "clouds"), ("base",)),  # as the image has it
    "dev": (("dev",), ("cpu",)),
}
# What an image has besides: the compiler of torch's own release of CUDA, whose headers refuse any
# other. FlashInfer compiles its kernels with it; left alone, packages bring the newest.
BESIDE: Final = {"cuda": "cuda-toolkit[nvcc]"}


def main() -> int:
    """Write all files; return the exit code."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if uv is None:
        print("make_constraints: uv is not installed (pip install 'lmi-vllm[dev]')")
        return 1
    CONSTRAINTS.mkdir(exist_ok=True)
    for name, (extras, shared) in PLAN.items():
        print(f"resolving {name}", flush=True)
        resolved = resolve(uv, name, extras, shared)
        known = read_pins("cpu") if name == "dev" else set()
        write(CONSTRAINTS / f"{name}.txt", name, without_hashes(resolved, known))
        if name in ("cpu", "cuda"):
            unfit = UNFIT_ON_CPU if name == "cpu" else ()
            blocks = [block for block in requirements(resolved) if name_of(block) not in unfit]
            write(CONSTRAINTS / f"{name}-hashes.txt", name, "\n".join(blocks) + "\n")
    return 0


def resolve(uv: str, name: str, extras: tuple[str, ...], shared: tuple[str, ...]) -> str:
    """Return uv's answer: one block of lines for each requirement, with hashes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "resolved.txt"
        if "--upgrade" not in sys.argv:
            output.write_text(preferences(name), encoding="utf-8")
        beside = Path(folder) / "beside.in"
        beside.write_text(BESIDE.get(name, ""), encoding="utf-8")
        command = [uv, "pip", "compile", "pyproject.toml", str(beside), "--quiet"]
        command += ["--generate-hashes"]
        command += ["--python-version", PYTHON_VERSION, "--python-platform", UV_PLATFORM]
        command += ["--no-header", "--no-annotate", "--output-file", str(output)]
        command += [word for extra in extras for word in ("--extra", extra)]
        for other in shared:
            kept = Path(folder) / f"{other}.txt"
            kept.write_text(shared_pins(other, extras), encoding="utf-8")
            command += ["--constraint", str(kept)]
        environ = dict(os.environ)
        if name == "cuda":  # where torch's CPU build lies, the CUDA build must not be looked for
            environ.pop("UV_FIND_LINKS", None)
            environ.pop("UV_INDEX", None)
        subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
        return output.read_text(encoding="utf-8")


def shared_pins(name: str, extras: tuple[str, ...]) -> str:
    """Return the versions of another file that hold beside these extras."""
    free = BOUND_BY_LMCACHE if "lmcache" in extras else ()
    lines = (CONSTRAINTS / f"{name}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if name_of(line) not in free)


def preferences(name: str) -> str:
    """Return the versions to keep where they fit: the file's, else those that are installed."""
    before = CONSTRAINTS / f"{name}.txt"
    if before.exists():
        return before.read_text(encoding="utf-8")
    if name == "cuda":
        return ""
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])
    return "".join(sorted(f"{item.name}=={item.version}\n" for item in found))


def requirements(resolved: str) -> Iterator[str]:
    """Yield each requirement with its hashes, as written."""
    for block in re.split(r"\n(?=\S)", resolved.strip()):
        if not block.startswith("#"):
            yield block


def name_of(block: str) -> str:
    """Return the name of the package of a requirement."""
    return re.split(r"[\[=;\s]", block, maxsplit=1)[0].lower()


def without_hashes(resolved: str, known: set[str]) -> str:
    """Return a line for each requirement not known, as constraints must be: without extras."""
    lines = [block.split("\n")[0].rstrip(" \\") for block in requirements(resolved)]
    pins = [re.sub(r"\[[^\]]*\]", "", line) for line in lines]
    return "".join(f"{pin}\n" for pin in pins if pin not in known)


def read_pins(name: str) -> set[str]:
    """Return the requirements of a file of versions."""
    lines = (CONSTRAINTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def write(path: Path, name: str, content: str) -> None:
    """Write a file below its two lines of heading."""
    heading = (
        f"# Generated by scripts/make_constraints.py for lmi-vllm[{name}]. Do not edit.\n"
        f"# Chosen for and tested on: Python {PYTHON_VERSION}, {PLATFORM}\n"
    )
    path.write_text(heading + content, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
