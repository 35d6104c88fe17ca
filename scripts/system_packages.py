"""What a bare machine lacks for an environment, and how it gets there.

As root on a Debian-like machine the distribution's packages are installed, as for the tools of the
tests. Another user gets the two that are needed unpacked into the environment. LMI_SETUP_PACKAGES=
none leaves the machine as it is. What stays missing is said in one line with one command.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NUMA = "libnuma.so.1"
# Loads the library before vLLM's kernels ask for it, in each process of the environment.
PRELOAD = (
    "import ctypes, os, sys; "
    f'ctypes.CDLL(os.path.join(sys.prefix, "lib", "{NUMA}"), ctypes.RTLD_GLOBAL)\n'
)
SECONDS = 600
PIP_WHEELS = "usr/share/python-wheels"  # in the package python3-pip-whl


@dataclass(frozen=True)
class Need:
    """One thing that the machine may lack; without an optional one something is only slower."""

    what: str
    package: str
    is_missing: Callable[[], bool]
    without: str = ""  # for an optional one: what it means to lack it

    @property
    def is_pip(self) -> bool:
        """Whether environments get no pip without it."""
        return self.package.endswith("-venv")


def needs(extra: str) -> list[Need]:
    """Return what an environment with this build of vLLM needs of the system."""
    own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    found = [Need("the module ensurepip", f"{own}-venv", lambda: find_spec("ensurepip") is None)]
    if extra != "cpu" or sys.platform != "linux":
        return found
    slower = "models of your own are not compiled, and slower"
    return [
        *found,
        Need(NUMA, "libnuma1", lambda: not has_numa()),
        Need("a C++ compiler", "g++", lambda: shutil.which("g++") is None, slower),
        Need("Python.h", f"{own}-dev", lambda: not _header().is_file(), slower),
    ]


def has_numa() -> bool:
    """Whether vLLM's CPU build finds the library that it links to."""
    try:
        ctypes.CDLL(NUMA)
    except OSError:
        return False
    return True


def missing(found: Sequence[Need]) -> list[Need]:
    """Return those that are not there."""
    return [need for need in found if need.is_missing()]


def install(found: Sequence[Need], say: Callable[[str], None]) -> list[Need]:
    """Install the packages where this machine is ours to change; return what stays missing."""
    lacking = missing(found)
    names = [need.package for need in lacking]
    if names and may_install() and os.geteuid() == 0:
        say(f"installing {', '.join(names)} with apt-get")
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run(["apt-get", "-qq", "update"], environ)
        for name in names:  # one that the distribution lacks keeps no other out
            _run(["apt-get", "-qq", "install", "-y", "--no-install-recommends", name], environ)
        lacking = missing(lacking)
    return lacking


def may_install() -> bool:
    """Whether packages of the distribution may be fetched here."""
    is_wanted = os.environ.get("LMI_SETUP_PACKAGES") != "none"
    return is_wanted and shutil.which("apt-get") is not None


def unpack(folder: Path, lacking: Sequence[Need]) -> list[Need]:
    """Put what is needed into the environment where the distribution has it; return the rest."""
    rest = []
    for need in lacking:
        if need.is_pip and unpack_pip(folder / "bin" / "python"):
            continue
        if need.package == "libnuma1" and unpack_numa(folder):
            continue
        rest.append(need)
    return rest


def said_of(lacking: Sequence[Need]) -> tuple[str, list[str]]:
    """Return why the set-up has to end, or "", and what to say of what is only useful."""
    needed = [need for need in lacking if not need.without]
    useful = [need for need in lacking if need.without]
    problem = f"this machine lacks {_listed(needed)}: {command_for(lacking)}" if needed else ""
    if not useful:
        return problem, []
    return problem, [
        f"this machine lacks {_listed(useful)}: {useful[0].without}. {command_for(useful)}"
    ]


def _listed(found: Sequence[Need]) -> str:
    return " and ".join(need.what for need in found)


def command_for(lacking: Sequence[Need]) -> str:
    """Return the command with which an administrator installs these."""
    if shutil.which("apt-get") is None and shutil.which("dnf") is not None:
        fedora = {"libnuma1": "numactl-libs", "g++": "gcc-c++"}
        names = [fedora.get(need.package, "python3-devel") for need in lacking]
        return f"sudo dnf install {' '.join(names)}"
    return f"sudo apt-get install {' '.join(need.package for need in lacking)}"


def unpack_numa(folder: Path) -> bool:
    """Put the library into the environment, which loads it from there; return whether it did."""
    with unpacked("libnuma1") as root:
        found = [] if root is None else sorted(root.rglob(f"{NUMA}*"))
        if not found:
            return False
        shutil.copyfile(found[0].resolve(), folder / "lib" / NUMA)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "lmi_vllm_numa.pth").write_text(PRELOAD, encoding="utf-8")
    return True


def unpack_pip(python: Path) -> bool:
    """Give an environment that was made without pip the distribution's; return whether it did."""
    with unpacked("python3-pip-whl") as root:
        wheels = [] if root is None else sorted((root / PIP_WHEELS).glob("pip-*.whl"))
        if not wheels:
            return False
        words = ["install", "-qq", "--no-index", "--no-deps", str(wheels[-1])]
        return _run([str(python), str(wheels[-1] / "pip"), *words], dict(os.environ))


@contextmanager
def unpacked(package: str) -> Iterator[Path | None]:
    """Yield a folder with the content of one of the distribution's packages; None without it."""
    tools = ("apt-get", "dpkg-deb")
    if not may_install() or not all(map(shutil.which, tools)):
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder, root = Path(name), Path(name, "root")
        yield root if _download(package, folder) and _unpack(folder, root) else None


def _download(package: str, folder: Path) -> bool:
    """Fetch a package without root; where the machine has no lists of them, with lists of ours."""
    fetch = ["-qq", "download", package]
    if _run(["apt-get", *fetch], dict(os.environ), folder):
        return True
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    own = [f"Dir::State={folder / 'state'}", f"Dir::Cache={folder / 'cache'}"]
    own += ["Dir::State::status=/var/lib/dpkg/status"]
    options = [word for one in own for word in ("-o", one)]
    environ = dict(os.environ)
    return _run(["apt-get", *options, "-qq", "update"], environ, folder) and _run(
        ["apt-get", *options, *fetch], environ, folder
    )


def _unpack(folder: Path, root: Path) -> bool:
    packages = [str(path) for path in folder.glob("*.deb")]
    return bool(packages) and _run(["dpkg-deb", "-x", packages[0], str(root)], dict(os.environ))


def _header() -> Path:
    return Path(sysconfig.get_path("include"), "Python.h")


def _run(command: list[str], environ: dict[str, str], folder: Path | None = None) -> bool:
    """Run a command quietly; return whether it succeeded."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, check=False, capture_output=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
