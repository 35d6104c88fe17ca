"""requirements.txt: real pip, a throw-away environment, wheels in the model directory."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_vllm.features.requirements.packages import (
    install_requirements,
    pip_arguments,
    requirements_of,
    with_failed_requirements,
)
from tests.support.wheels import make_wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment may be filled; nothing reaches the one of the tests."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory that needs one package."""
    (tmp_path / "requirements.txt").write_text("tinyreq\n")
    return tmp_path


def install(model: Path, python: str, **environ: str) -> str | None:
    """Install as the server does."""
    found = requirements_of(model)
    assert found is not None
    return asyncio.run(install_requirements(found, {**os.environ, **environ}, python))


def answer(python: str, module: str) -> str:
    """What the throw-away environment says."""
    code = f"import {module}; print({module}.ANSWER)"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return run.stdout.strip() or run.stderr.splitlines()[-1]


def test_requirements_are_installed_from_wheels_of_the_model_offline(
    model: Path, python: str
) -> None:
    """A wheel in requirements/ is found, and offline nothing else is asked."""
    make_wheel(model / "requirements")
    make_wheel(model / "elsewhere", "other")
    before = sorted(str(path.relative_to(model)) for path in model.rglob("*"))
    assert install(model, python, DJL_OFFLINE="true") is None
    assert answer(python, "tinyreq") == "42"
    after = sorted(str(path.relative_to(model)) for path in model.rglob("*"))
    assert after == before, "the model directory is never written to"


def test_requirements_modules_of_the_model_are_not_pip_s(model: Path, python: str) -> None:
    """It works in the model directory, where a `logging.py` was imported in its place."""
    make_wheel(model / "requirements")
    for name in ("pip", "logging", "typing"):
        (model / f"{name}.py").write_text("raise SystemExit(9)")
    assert install(model, python, DJL_OFFLINE="true") is None


def test_requirements_relative_paths_count_from_the_model(tmp_path: Path, python: str) -> None:
    """`./wheels/x.whl` names a file of the model, wherever the server was started."""
    make_wheel(tmp_path / "wheels", "relreq", needs="not-there-anywhere")
    (tmp_path / "requirements.txt").write_text("./wheels/relreq-1.0-py3-none-any.whl\n")
    # Offline without requirements/: no dependencies, so the missing one does not matter.
    assert install(tmp_path, python, DJL_OFFLINE="true") is None
    assert answer(python, "relreq") == "42"


def test_requirements_failure_is_a_warning_with_pip_s_output(
    model: Path, python: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The start goes on; the log has pip's own text, and the failure is kept for later."""
    (model / "requirements.txt").write_text("tinymissing==9.9\n")
    make_wheel(model / "requirements")
    with caplog.at_level(logging.WARNING):
        failure = install(model, python, DJL_OFFLINE="true")
    assert failure is not None
    assert str(model / "requirements.txt") in failure
    assert "No matching distribution found for tinymissing==9.9" in caplog.text


def test_requirements_failure_hides_logins_of_indexes(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A password in an index URL does not reach the log, whatever the tool prints."""
    talkative = tmp_path / "talkative"
    talkative.write_text("#!/bin/sh\necho Looking in https://me:hunter2@index/x >&2; exit 1\n")
    talkative.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert install(model, str(talkative)) is not None
    assert "Looking in https://***@index/x" in caplog.text
    assert "hunter2" not in caplog.text


def test_requirements_install_ends_with_the_start(model: Path, tmp_path: Path) -> None:
    """A start that is cancelled leaves no pip behind."""
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ > {pipe}\nexec sleep 600\n")
    slow.chmod(0o755)

    async def cancel() -> int:
        file = model / "requirements.txt"
        task = asyncio.create_task(install_requirements(file, dict(os.environ), str(slow)))
        pid = int(await asyncio.to_thread(pipe.read_text))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    assert not Path(f"/proc/{asyncio.run(cancel())}").exists()


@pytest.mark.parametrize(
    ("wheels", "offline", "expected"),
    [
        (False, "", []),
        (True, "", ["--find-links", "{wheels}"]),
        (True, "true", ["--find-links", "{wheels}", "--no-index"]),
        (False, "true", ["--no-deps"]),
    ],
    ids=["plain", "wheels", "offline wheels", "offline"],
)
def test_requirements_arguments(
    model: Path, wheels: bool, offline: str, expected: list[str]
) -> None:
    """Wheels and offline mode (docs/sources.md#requirements)."""
    if wheels:
        (model / "requirements").mkdir()
    file = model / "requirements.txt"
    words = pip_arguments(file, {"DJL_OFFLINE": offline}, is_quiet=True)
    assert words[:2] == ["install", "--quiet"]
    rest = words[words.index(str(file)) + 1 :]
    assert rest == [word.format(wheels=model / "requirements") for word in expected]


def test_requirements_of_no_directory() -> None:
    """No directory, no requirements."""
    assert requirements_of(None) is None
    assert requirements_of(Path("/nonexistent")) is None


def test_failed_requirements_are_named_beside_why_a_start_failed() -> None:
    """What they would have brought may be the cause, whatever the engine's error says."""
    assert with_failed_requirements("r", "x failed") == "r. Before that, x failed"
    assert with_failed_requirements("r", None) == "r"
