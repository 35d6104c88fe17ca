"""A model's requirements.txt is installed before the engine starts, into the server's environment.

The server runs from a throw-away environment, which sees the packages of this one.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from integration.conftest import StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.wheels import make_wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter of its own, with our packages by a path file."""
    folder = tmp_path_factory.mktemp("server-venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    root = Path(__file__).parents[1]
    (site / "outer.pth").write_text(f"{root}\n{sysconfig.get_paths()['purelib']}\n")
    return str(folder / "bin" / "python")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with its own package, named by serving.properties' environment."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in DEMO_MODEL_DIR.iterdir():
        if file.is_file() and file.suffix != ".py":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "requirements.txt").write_text("tinyreq\n")
    return folder


def test_requirements_are_there_when_the_model_is_ready(
    server_process: StartServer, model: Path, python: str
) -> None:
    """The wheel beside requirements.txt is installed, offline; the model directory stays."""
    make_wheel(model / "requirements")
    before = sorted(model.rglob("*"))
    server = server_process(
        "--model-store", str(model), "--port", "0", "--engine", "scripted",
        environ={"DJL_OFFLINE": "true"}, launcher=[python],
    )  # fmt: skip
    server.wait_listening()
    server.wait_ready(120)
    code = "import tinyreq; print(tinyreq.ANSWER)"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "42\n"
    assert sorted(model.rglob("*")) == before


def test_requirements_that_fail_do_not_stop_the_start(
    server_process: StartServer, model: Path, python: str
) -> None:
    """The model is served; the warning carries pip's words."""
    (model / "requirements.txt").write_text("no-such-package-here\n")
    (model / "requirements").mkdir()
    server = server_process(
        "--model-store", str(model), "--port", "0", "--engine", "scripted",
        environ={"DJL_OFFLINE": "true"}, launcher=[python],
    )  # fmt: skip
    server.wait_listening()
    server.wait_ready(120)
    assert "could not be installed" in server.stderr
    assert "No matching distribution found for no-such-package-here" in server.stderr


@pytest.mark.vllm
def test_failed_requirements_are_named_when_an_import_fails(
    server_process: StartServer, model: Path, python: str
) -> None:
    """An engine that cannot import what the file should have brought says both."""
    (model / "requirements.txt").write_text("no-such-package-here\n")
    (model / "requirements").mkdir()
    server = server_process(
        "--model-store", str(model), "--port", "0",
        environ={"DJL_OFFLINE": "true", "OPTION_WORKER_CLS": "no_such_package_here.Worker"},
        launcher=[python],
    )  # fmt: skip
    assert server.wait_exit(120) == 1, server.describe()
    reason = server.stderr.strip().splitlines()[-1]
    assert "no_such_package_here" in reason
    assert "requirements.txt could not be installed" in reason
