"""The wheel and the sdist work where the repository is not: explain without vLLM, and the demo."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import StartServer
from lmi_vllm._version import __version__

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "config" / "constraints"


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the repository, with nothing of it on the Python path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel out of the unpacked sdist: so the sdist is proven too."""
    folder = tmp_path_factory.mktemp("packages")
    answer = run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    if "Could not find a version" in answer.stderr + answer.stdout:
        pytest.skip("needs the package index: setuptools for the build could not be fetched")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern."""
    (found,) = folder.glob(pattern)
    return found


def test_packages_state_the_version_and_carry_data_and_licence(packages: Path) -> None:
    """One version everywhere; what is read at run time is inside."""
    wheel = only(packages, f"lmi_vllm-{__version__}-*.whl")
    assert only(packages, f"lmi_vllm-{__version__}.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert f"lmi_vllm-{__version__}.dist-info/licenses/LICENSE" in names
    for path in sorted((ROOT / "lmi_vllm").rglob("*")):
        if path.is_file() and path.suffix not in (".pyc",):
            assert str(path.relative_to(ROOT)) in names, f"{path} is not in the wheel"


def test_version_is_stated_nowhere_else() -> None:
    """pyproject.toml reads it from `_version.py`; the changelog names it once it is released."""
    assert f'"{__version__}"' not in (ROOT / "pyproject.toml").read_text()
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[:1] in ([], [__version__])


def test_base_installs_clean_and_explains(packages: Path, tmp_path: Path) -> None:
    """A new environment without extras, in the tested versions: `explain` needs no vLLM."""
    venv.create(tmp_path / "new", with_pip=True)
    python = tmp_path / "new" / "bin" / "python"
    wanted = [only(packages, "*.whl"), "-c", CONSTRAINTS / "base.txt"]
    answer = run(python, "-m", "pip", "install", "-q", *wanted, folder=tmp_path)
    if "Could not find a version" in answer.stderr:
        pytest.skip("needs the package index")
    assert answer.returncode == 0, answer.stderr
    command = [python.with_name("lmi-vllm"), "explain", "--model", "acme/model", "--format", "json"]
    answer = run(*command, folder=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert '"acme/model"' in answer.stdout
    answer = run(python, "-m", "pip", "check", folder=tmp_path)
    assert answer.returncode == 0, answer.stdout
    answer = run(python, "-c", "import lmi_vllm; print(lmi_vllm.__file__)", folder=tmp_path)
    assert answer.stdout.startswith(str(tmp_path))


@pytest.mark.vllm
def test_demo_answers_from_the_installed_wheel(
    packages: Path, tmp_path: Path, server_process: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve --demo` outside the repository: the wheel brings all of ours, vLLM is lent."""
    venv.create(tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    wheel = only(packages, "*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python)
    answer = run(*pip, "install", "-q", "--no-deps", wheel, folder=tmp_path)
    assert answer.returncode == 0, answer.stderr
    # Last on the path, and without its .pth files: what is ours can come from the wheel only.
    lent = only(tmp_path, "new/lib/python*/site-packages") / "lent.pth"
    lent.write_text(sysconfig.get_path("purelib"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    server = server_process("--demo", "--port", "0", launcher=(str(python),))
    url = server.url_when_ready()
    answer = call(url, "/invocations", {"inputs": "The capital of France is"})
    assert answer.json() == {"generated_text": " Paris. The city lies on the river Seine."}
    assert str(tmp_path / "new") in server.stderr  # the model's folder in the log


@pytest.mark.parametrize("extra", ["base"])  # the others are made alike, of 150 packages each
def test_an_extra_has_a_bill_of_materials(extra: str) -> None:
    """CycloneDX 1.6 with each pin; cyclonedx-py itself checks it against the schema."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from make_release import bill_of_materials  # noqa: PLC0415
    finally:
        sys.path.pop(0)
    document = bill_of_materials(extra, __version__)
    assert document["specVersion"] == "1.6"
    assert document["metadata"]["component"]["version"] == __version__
    pinned = re.findall(r"^([\w.-]+)==", (CONSTRAINTS / f"{extra}.txt").read_text(), re.M)
    assert {part["name"] for part in document["components"]} == set(pinned)
