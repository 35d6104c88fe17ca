"""When weights are read ahead, and when that is left to vLLM or not done."""

from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.features.weights_ahead import start as module
from lmi_vllm.features.weights_ahead.reading import ReadAhead
from lmi_vllm.features.weights_ahead.start import SMALLEST, begin, wanted_by
from lmi_vllm.inference.start_progress import Phase, StartProgress
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.start_parts import PlannedStart
from tests.support.assembled import SOURCES, load_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model of two files, with holes for weights."""
    for number, size in enumerate((SMALLEST, 1000)):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)
    return tmp_path


def planned(
    folder: Path, engine: str = "vllm", setting: str = "true", **values: Any
) -> PlannedStart:
    """Return a start of the model, with arguments and LMI_READ_AHEAD."""
    environ = {"LMI_READ_AHEAD": setting} if setting else {}
    arguments = EngineArguments({"model": str(folder), **values})
    model = ModelArtifacts("m", str(folder), str(folder))
    return PlannedStart(engine, load_settings(environ), environ, model, arguments, SOURCES)


def test_weights_of_a_folder_are_read(folder: Path) -> None:
    """Unless they are not to be; and the start knows their sizes."""
    start = planned(folder, setting="")
    thread = begin(start)
    assert thread is not None
    thread.join(30)
    start.progress.enter(Phase.ENGINE)
    start.progress.enter_step("weights", {"weight_files": 1.0, "weight_files_total": 2.0})
    assert start.progress.figures["weight_bytes"] == SMALLEST


@pytest.mark.parametrize(
    "given",
    [
        {"setting": "false"},
        {"engine": "scripted"},
        {"load_format": "runai_streamer"},
        {"load_format": "dummy"},
        {"model_weights": "s3://b/m/"},
        {"nnodes": 2},
    ],
    ids=str,
)
def test_nothing_is_read(folder: Path, given: dict[str, Any]) -> None:
    """Where it is not on, where nothing is read from files, where it is not known what is."""
    assert begin(planned(folder, **given)) is None


def test_small_models_and_those_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    """No thread for what is read in no time."""
    assert begin(planned(tmp_path / "gone")) is None
    (folder / "model-0.safetensors").unlink()
    assert begin(planned(folder)) is None
    (folder / "model-0.safetensors").symlink_to(tmp_path / "nowhere")
    assert begin(planned(folder)) is None


@pytest.mark.parametrize(
    ("kind", "values", "is_wanted"),
    [
        ("ext4", {}, True),
        ("ext4", {"safetensors_load_strategy": "prefetch"}, False),
        ("nfs4", {}, False),
        ("nfs4", {"safetensors_load_strategy": "lazy"}, True),
    ],
)
def test_vllm_s_own_reading_ahead_goes_before(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    values: dict[str, Any],
    is_wanted: bool,
) -> None:
    """It begins when vLLM loads the weights; until then ours reads."""
    found: list[ReadAhead] = []
    monkeypatch.setattr(module, "file_system", lambda _: kind)

    def run(ahead: ReadAhead) -> None:
        found.append(ahead)

    monkeypatch.setattr(ReadAhead, "run", run)
    start = planned(folder, **values)
    thread = begin(start)
    assert thread is not None
    thread.join(30)
    start.progress.enter(Phase.ENGINE)
    start.progress.enter_step("set-up", {})
    assert found[0]._is_wanted(0)
    start.progress.enter_step("weights", {})
    assert found[0]._is_wanted(0) is is_wanted


def test_a_file_is_wanted_until_the_engine_has_read_it() -> None:
    """A start that has failed or is over needs none."""
    progress = StartProgress()
    is_wanted = wanted_by(progress, until="weights")
    assert is_wanted(0)
    progress.enter(Phase.ENGINE)
    progress.enter_step("weights", {"weight_files": 2.0, "weight_files_total": 9.0})
    assert [is_wanted(place) for place in range(4)] == [False, False, True, True]
    progress.enter_step("profile", {})
    assert not is_wanted(3)
    other = StartProgress()
    is_wanted = wanted_by(other, until="weights")
    other.end()
    assert not is_wanted(0)
