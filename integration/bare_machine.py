"""`make serve` and `make test` on a machine that has Python, git and make: a Debian of debootstrap.

An ordinary user with an empty HOME; no font, no compiler, no tool of the development machine. What
is lent from here is Python and the packages that `make setup` has installed, which are large.
README's commands are run, `make serve` among them. `make test` takes long beside other tests: with
LMI_TEST_BARE_INSTALL=1 (15 minutes, gigabytes) a part of it is run, and all of it after the
packages were installed there, from where pip looks here.
"""

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from integration.client import call
from tests.support.documentation import Block, Step, blocks_of, steps_of

ROOT = Path(__file__).parent.parent
ENVIRONMENT = Path(sys.prefix)
OUTPUT = ROOT / "build/bare-machine.txt"  # of all of `make test`
USER = 1234
HOME = "/home/user"
ENTER = "enter.sh"
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
# Debian's Python as well, for the libraries that every Python needs; libnuma1 for vLLM on a CPU.
PACKAGES = "python3,git,make,ca-certificates,libnuma1"
ALL_PACKAGES = f"{PACKAGES},curl"
# Where an environment that `make setup` has filled would say so.
STAMP = (
    "import sys; sys.path.insert(0, 'scripts'); import setup; "
    "print(setup.fingerprint(setup.chosen_environment('')), end='')"
)

# Sets an environment up whose packages are not installed, which would take gigabytes.
SET_UP = (
    "import sys; sys.argv = ['scripts/setup.py']; sys.path.insert(0, 'scripts'); import setup; "
    "setup.install = lambda _: None; sys.exit(setup.main())"
)

IF_ASKED = pytest.mark.skipif(
    os.environ.get("LMI_TEST_BARE_INSTALL") != "1", reason="needs LMI_TEST_BARE_INSTALL=1"
)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="needs debootstrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: debootstrap and chroot"),
    pytest.mark.skipif(ENVIRONMENT.name != ".venv", reason="needs the .venv of `make setup`"),
    pytest.mark.skipif(sys.base_prefix == "/usr", reason="needs a Python that can be lent"),
]


@dataclass(frozen=True)
class Release:
    """A distribution that debootstrap makes a root of, and the folder of the Python to run."""

    name: str = "bookworm"
    mirror: str = "http://deb.debian.org/debian"
    packages: str = PACKAGES
    python: str = f"{sys.base_prefix}/bin"
    options: tuple[str, ...] = ()
    script: str = ""  # debootstrap's, where it has none for this release


@dataclass(frozen=True)
class Machine:
    """A root folder with the project in it, and what else its commands have set."""

    root: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    python: str = Release.python

    def command(self, *words: str) -> list[str]:
        """Return what runs `words` in the project's folder as the user, with nothing else set."""
        path = f"{self.python}:/usr/bin:/bin"
        environment = [f"HOME={HOME}", f"PATH={path}", "LMI_VLLM_EXTRA=cpu"]
        environment += [f"{name}={value}" for name, value in self.environ.items()]
        inside = ["/usr/bin/env", "-i", "-C", str(ENVIRONMENT.parent), *environment, *words]
        return ["unshare", "--mount", "sh", str(self.root.parent / ENTER), *inside]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run to the end and return what it said."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return the machine; what it is lent is mounted read-only, or below a layer of its own."""
    return _with_environment(_debian(tmp_path_factory.mktemp("bare")))


def _with_environment(machine: Machine) -> Machine:
    """Lend the packages of this environment, below a layer of the machine's own."""
    folder = machine.root.parent
    for name in ("upper", "work"):
        (folder / name).mkdir(exist_ok=True)
    layers = f"lowerdir={ENVIRONMENT},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    _lend(machine.root, [(str(ENVIRONMENT), f"-t overlay -o {layers} x")])
    stamp = machine.run("python3", "-c", STAMP)
    assert stamp.returncode == 0, stamp.stderr
    (folder / "upper" / ".lmi-vllm-setup").write_text(stamp.stdout)
    return machine


@pytest.fixture
def empty_machine(tmp_path: Path) -> Machine:
    """Return a machine that has Python, and the packages that pip finds here, not yet installed."""
    return with_packages(tmp_path, Release())


@pytest.fixture
def debian_machine(tmp_path: Path) -> Machine:
    """Return a machine with the distribution's own Python over the packages that are lent."""
    machine = _debian(tmp_path, Release(packages=ALL_PACKAGES))
    own = ".".join(map(str, sys.version_info[:2]))
    if not (machine.root / f"usr/bin/python{own}").exists():
        pytest.skip(f"the distribution has no Python {own}, for which the packages are")
    programs = tmp_path / "upper" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "python3"):
        (programs / name).symlink_to("/usr/bin/python3")
    (programs / "lmi-vllm").write_text('#!/bin/sh\nexec python -m lmi_vllm "$@"\n')
    (programs / "lmi-vllm").chmod(0o755)
    (tmp_path / "upper" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    return _with_environment(replace(machine, python=f"{ENVIRONMENT}/bin:/usr/bin"))


def with_packages(folder: Path, release: Release) -> Machine:
    """Return a machine of this release that installs packages from where pip looks here."""
    machine = _debian(folder, release)
    settings = pip_settings()
    words = " ".join(settings.values()).replace("file://", "").split()
    found = {Path(word).parent for word in words if word.startswith("/") and Path(word).exists()}
    places = [str(path) for path in found if not found & set(path.parents)]  # with what is beside
    _lend(machine.root, [(place, f"--bind -o ro {place}") for place in places])
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", machine.root / "etc" / name)
    proxies = {name: os.environ[name] for name in PROXIES if name in os.environ}
    return Machine(machine.root, settings | proxies, release.python)


def pip_settings() -> dict[str, str]:
    """Return what pip is configured with here, as variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = (line.partition("=") for line in lines)
    found = {
        name.rpartition(".")[2].upper().replace("-", "_"): literal_eval(value)
        for name, _, value in pairs
    }
    return {f"{tool}_{name}": value for name, value in found.items() for tool in ("PIP", "UV")}


def _debian(folder: Path, release: Release = Release()) -> Machine:
    root = folder / "root"
    if release.name == Release.name:
        subprocess.run(["cp", "-a", _debian_with_all(), root], check=True)
        others = {*ALL_PACKAGES.split(",")} - {*release.packages.split(",")}
        purge = ["chroot", str(root), "dpkg", "--purge", "--force-depends", *others]
        if others:
            subprocess.run(purge, capture_output=True, check=True)
    else:
        _debootstrap(root, release)
    _copy_project(root / str(ENVIRONMENT.parent)[1:])
    home = root / HOME[1:]
    home.mkdir()
    os.chown(home, USER, USER)
    (root / "root").chmod(0o755)  # Python may lie below it
    return Machine(root)


@functools.cache
def _debian_with_all() -> Path:
    """Return a Debian with what one of the machines has: packages are unpacked once for all."""
    folder = tempfile.mkdtemp(prefix="lmi-debian-")
    atexit.register(shutil.rmtree, folder)
    root = Path(folder) / "root"
    _debootstrap(root, Release(packages=ALL_PACKAGES))
    return root


def _debootstrap(root: Path, release: Release) -> None:
    command = [
        "debootstrap", "--variant=minbase", "--no-check-gpg", f"--include={release.packages}",
        *release.options, release.name, str(root), release.mirror, *filter(None, [release.script]),
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"debootstrap could not make a Debian: {made.stdout[-200:]}")


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


def _lend(root: Path, more: Iterable[tuple[str, str]]) -> None:
    """Write what enters the machine: Python and `more` are mounted for as long as it runs.

    The mounts are those of a namespace of its own: nothing is left behind, however a test ends.
    """
    lines = ["set -e"]
    for place, what in (
        ("/proc", "--bind /proc"),
        ("/sys", "--bind -o ro /sys"),
        ("/dev/shm", "-t tmpfs -o mode=1777 x"),
        ("/dev/pts", "-t devpts -o ptmxmode=0666 x"),
        (sys.base_prefix, f"--bind -o ro {sys.base_prefix}"),
        *more,
    ):
        inside = root / place[1:]
        if Path(place).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        lines.append(f"mount {what} {inside}")
    lines.append(f'exec chroot --userspec={USER}:{USER} {root} "$@"')
    (root.parent / ENTER).write_text("\n".join(lines))


MAKE_SERVE = ("make", "serve", "ARGS=--port 0")


@contextlib.contextmanager
def serving(machine: Machine, tmp_path: Path, words: tuple[str, ...] = MAKE_SERVE) -> Iterator[str]:
    """Serve for the body, which gets the URL; the server is ended with all that it has started."""
    errors = (tmp_path / "errors").open("w+")
    process = subprocess.Popen(
        machine.command(*words),
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


@IF_ASKED
def test_both_commands_run_on_a_bare_machine(empty_machine: Machine, tmp_path: Path) -> None:
    """`make serve` and all of `make test`, with an empty .venv, HOME and no name for git."""
    with serving(empty_machine, tmp_path) as url:
        answer = call(url, "/invocations", {"inputs": "The capital of France is"})
    assert answer.json() == {"generated_text": " Paris. The city lies on the river Seine."}
    done = empty_machine.run("make", "test", "ARGS=-q")
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(done.stdout + done.stderr, encoding="utf-8")
    assert done.returncode == 0, f"see {OUTPUT}: {done.stdout[-6000:]}"
    print(done.stdout[-3000:])


def test_every_command_of_readme_runs(debian_machine: Machine, tmp_path: Path) -> None:
    """As an ordinary user, with the distribution's Python: what is shown is what is printed."""
    version = debian_machine.run("python", "-c", "import sys; print(sys.base_prefix)")
    assert version.stdout == "/usr\n"
    count = 0
    with serving(debian_machine, tmp_path) as url:
        for block in (one for one in blocks_of("README.md") if one.is_run):
            steps = [*steps_of(block)] if block.language == "console" else _targets(block)
            for step in steps:
                command = step.command.replace("http://", "").replace("localhost:8080", url[7:])
                done = debian_machine.run("bash", "-uc", command)
                assert not done.returncode, (command, done.stdout, done.stderr)
                parts = map(re.escape, step.shown.strip().split("..."))
                assert re.fullmatch(".*".join(parts), done.stdout.strip(), re.DOTALL), command
                count += 1
    assert count >= 5


def _targets(block: Block) -> list[Step]:
    """Return the targets of make that a block names; other tests run them."""
    lines = [line.partition("#")[0].strip() for line in block.text.splitlines()]
    return [Step(line.replace("make ", "make -n ", 1), "...") for line in lines if line]


def test_missing_library_of_vllm_is_named(machine: Machine) -> None:
    """Without libnuma the start ends at once, with the package to install."""
    libraries = list((machine.root / "usr/lib").rglob("libnuma.so*"))
    assert libraries
    for path in libraries:
        path.rename(path.with_name(f"away-{path.name}"))
    try:
        done = machine.run(*MAKE_SERVE)
    finally:
        for path in libraries:
            path.with_name(f"away-{path.name}").rename(path)
    assert done.returncode != 0
    assert "apt-get install libnuma1" in done.stderr


def test_set_up_brings_what_debian_s_python_lacks(tmp_path: Path) -> None:
    """No pip, no ensurepip, no libnuma, no root: both are unpacked into .venv; a cut one is remade.

    Where the distribution is not to be asked, one line has the command, and no time was lost.
    """
    release = Release(packages="python3,git,make,ca-certificates", python="/usr/bin")
    machine = with_packages(tmp_path, release)
    refused = replace(machine, environ={**machine.environ, "LMI_SETUP_PACKAGES": "none"})
    done = refused.run("python3", "-c", SET_UP)
    wanted = "setup: this machine lacks the module ensurepip and libnuma.so.1: sudo apt-get install"
    assert (done.returncode, wanted in done.stdout) == (1, True), done.stdout + done.stderr
    done = machine.run("python3", "-c", SET_UP)
    assert "creating .venv again: it was not complete" in done.stdout, done.stdout + done.stderr
    assert "models of your own are not compiled" in done.stdout
    assert (done.returncode, "ready" in done.stdout) == (0, True), done.stdout + done.stderr
    python = str(ENVIRONMENT / "bin" / "python")
    done = machine.run(python, "-c", "import ctypes, pip; ctypes.CDLL('libnuma.so.1')")
    assert not done.returncode, done.stderr
    assert not machine.run("make", "setup").stdout  # it is there


@IF_ASKED
def test_make_test_runs(machine: Machine) -> None:
    """A part of its tests, with the real engine and processes; all would take as long again.

    There is no compiler and no curl: vLLM's own server and worker would use the first, pages the
    second.
    """
    words = "headers or documented_commands or (generative_scoring and whole)"
    words += " or mixes_prompt_logprobs"
    done = machine.run("make", "test", f"ARGS=-q -p no:cacheprovider -k '{words}'")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    # The quick tests, those of the engine, and what failed beside others and then passed alone.
    assert done.stdout.count(" passed") >= 2, done.stdout[-3000:]


def test_it_is_bare(machine: Machine) -> None:
    """Nothing has come in that would hide what is missing."""
    found = machine.run("sh", "-c", "command -v gcc fc-list openssl curl chromium; ls -A $HOME")
    assert not {"gcc", "fc-list", "curl", "chromium"} & {
        Path(line).name for line in found.stdout.split()
    }
