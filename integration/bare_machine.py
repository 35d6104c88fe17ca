"""`make serve` and tests on a machine that has Python, git and make: a Debian made by debootstrap.

An ordinary user with an empty HOME; no font, no compiler, no tool of the development machine. What
is lent from here is Python and the packages that `make setup` has installed, which are large: how
they are installed is for `packages_install_clean.py` and `image_in_a_debian_root.py` to show.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.client import call

ROOT = Path(__file__).parent.parent
ENVIRONMENT = Path(sys.prefix)
USER = 1234
HOME = "/home/user"
ENTER = "enter.sh"
# Debian's Python as well, for the libraries that every Python needs; libnuma1 for vLLM on a CPU.
PACKAGES = "python3,git,make,ca-certificates,libnuma1"
# Where an environment that `make setup` has filled would say so.
STAMP = (
    "import sys; sys.path.insert(0, 'scripts'); import setup; "
    "print(setup.fingerprint(setup.chosen_environment('')), end='')"
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="needs debootstrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: debootstrap and chroot"),
    pytest.mark.skipif(ENVIRONMENT.name != ".venv", reason="needs the .venv of `make setup`"),
    pytest.mark.skipif(sys.base_prefix == "/usr", reason="needs a Python that can be lent"),
]


@dataclass(frozen=True)
class Machine:
    """A root folder with the project in it."""

    root: Path

    def command(self, *words: str) -> list[str]:
        """Return what runs `words` in the project's folder as the user, with nothing else set."""
        path = f"{sys.base_prefix}/bin:/usr/bin:/bin"
        environment = [f"HOME={HOME}", f"PATH={path}", "LMI_VLLM_EXTRA=cpu"]
        inside = ["/usr/bin/env", "-i", "-C", str(ENVIRONMENT.parent), *environment, *words]
        return ["unshare", "--mount", "sh", str(self.root.parent / ENTER), *inside]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run to the end and return what it said."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return the machine; what it is lent is mounted read-only, or below a layer of its own."""
    folder = tmp_path_factory.mktemp("bare")
    root = folder / "root"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"debootstrap could not make a Debian: {made.stdout[-200:]}")
    machine = Machine(root)
    _copy_project(root / str(ENVIRONMENT.parent)[1:])
    home = root / HOME[1:]
    home.mkdir()
    os.chown(home, USER, USER)
    (root / "root").chmod(0o755)  # Python may lie below it
    _lend(root, folder)
    stamp = machine.run("python3", "-c", STAMP)
    assert stamp.returncode == 0, stamp.stderr
    (folder / "upper" / ".lmi-vllm-setup").write_text(stamp.stdout)
    return machine


def _copy_project(place: Path) -> None:
    """Copy what git knows of, as a clone would have it; all of it is the user's."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    for path in (place, *place.rglob("*")):
        os.chown(path, USER, USER)


def _lend(root: Path, folder: Path) -> None:
    """Write what enters the machine: Python and the environment are mounted for as long as it runs.

    The mounts are those of a namespace of its own: nothing is left behind, however a test ends.
    """
    for name in ("upper", "work"):
        (folder / name).mkdir()
    layers = f"lowerdir={ENVIRONMENT},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    lines = ["set -e"]
    for place, what in (
        ("/proc", "--bind /proc"),
        ("/sys", "--bind -o ro /sys"),
        ("/dev/shm", "-t tmpfs -o mode=1777 x"),
        (sys.base_prefix, f"--bind -o ro {sys.base_prefix}"),
        (str(ENVIRONMENT), f"-t overlay -o {layers} x"),
    ):
        (root / place[1:]).mkdir(parents=True, exist_ok=True)
        lines.append(f"mount {what} {root / place[1:]}")
    lines.append(f'exec chroot --userspec={USER}:{USER} {root} "$@"')
    (folder / ENTER).write_text("\n".join(lines))


@pytest.fixture
def served(machine: Machine, tmp_path: Path) -> Iterator[str]:
    """Return the URL of `make serve`; it is ended with all that it has started."""
    errors = (tmp_path / "errors").open("w+")
    process = subprocess.Popen(
        machine.command("make", "serve", "ARGS=--port 0"),
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = []
    try:
        for line in process.stdout:  # ends with the process
            seen.append(line)
            if line.startswith("Ready on "):
                yield line.split()[2]
                return
        errors.seek(0)
        pytest.fail(f"it ended: {''.join(seen)}\n{errors.read()[-3000:]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            errors.close()


def test_make_serve_answers(served: str) -> None:
    """The embedded model, from a clone, as a user who has nothing."""
    answer = call(served, "/invocations", {"inputs": "The capital of France is"})
    assert answer.json() == {"generated_text": " Paris. The city lies on the river Seine."}


def test_missing_library_of_vllm_is_named(machine: Machine) -> None:
    """Without libnuma the start ends at once, with the package to install."""
    libraries = list((machine.root / "usr/lib").rglob("libnuma.so*"))
    assert libraries
    for path in libraries:
        path.rename(path.with_name(f"away-{path.name}"))
    try:
        done = machine.run("make", "serve", "ARGS=--port 0")
    finally:
        for path in libraries:
            path.with_name(f"away-{path.name}").rename(path)
    assert done.returncode != 0
    assert "apt-get install libnuma1" in done.stderr


def test_make_unit_runs(machine: Machine) -> None:
    """Tests pass without the tools of this machine; those of HTTP stand for all, for their time."""
    words = "web and (golden or headers)"
    done = machine.run("make", "unit", f"ARGS=-q -p no:cacheprovider -k '{words}'")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_it_is_bare(machine: Machine) -> None:
    """Nothing has come in that would hide what is missing."""
    found = machine.run("sh", "-c", "command -v gcc fc-list openssl curl chromium; ls -A $HOME")
    assert not {"gcc", "fc-list", "curl", "chromium"} & {
        Path(line).name for line in found.stdout.split()
    }
