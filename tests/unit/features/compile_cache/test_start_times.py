"""How long starts took is kept on the disk, so that the next process can say what is left."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from lmi_vllm.features.compile_cache.start_times import SUFFIX, StartTimes, start_times
from lmi_vllm.inference.start_progress import Phase, StartProgress
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.start_parts import PlannedStart
from tests.support.assembled import SOURCES, load_settings

MODEL = ModelArtifacts("m", "org/model", "org/model")


class Process:
    """One process that starts the model; its clock is set by hand."""

    def __init__(
        self, root: Path, front_ends: int = 1, method: str = "", **arguments: object
    ) -> None:
        self.now = 0.0
        self.progress = StartProgress(lambda: self.now)
        variables = {
            "LMI_FRONTEND_PROCESSES": str(front_ends),
            "VLLM_WORKER_MULTIPROC_METHOD": method,
        }
        start = PlannedStart(
            "vllm", load_settings(variables), {}, MODEL,
            EngineArguments(arguments), SOURCES, self.progress,
        )  # fmt: skip
        times = start_times(start, root)
        assert times is not None
        self.times: StartTimes = times
        asyncio.run(times.read())
        self.progress.enter(Phase.DOWNLOAD)
        self.now += 100  # of a download, which is no part of it
        self.progress.enter(Phase.ENGINE)

    def become_ready(self, seconds: float) -> None:
        """End the start that runs, after so long."""
        self.now += seconds

        async def write() -> None:
            if (writing := self.times.write()) is not None:
                await writing

        asyncio.run(write())
        self.progress.end(is_ready=True)


def kept(root: Path) -> Path:
    """The one file."""
    [path] = (root / "lmi_vllm").iterdir()
    return path


def test_next_process_says_what_is_left(tmp_path: Path) -> None:
    """Of the first start, of an engine that is started again, and of this model alone."""
    first = Process(tmp_path)
    assert first.progress.seconds_left == 0.0
    first.become_ready(38.24)
    first.progress.restart()
    first.become_ready(4)
    assert kept(tmp_path).name.endswith(SUFFIX)
    second = Process(tmp_path)
    second.now += 8
    assert second.progress.seconds_left == pytest.approx(30.2)
    second.become_ready(2)
    second.progress.restart()
    second.now += 1
    assert second.progress.seconds_left == 3.0
    second.become_ready(4)
    assert json.loads(kept(tmp_path).read_text()) == {"first_seconds": 10, "again_seconds": 5}
    assert Process(tmp_path, max_model_len=5).progress.seconds_left == 0.0


def test_start_that_waits_for_front_ends_is_estimated_with_them(tmp_path: Path) -> None:
    """By one with as many: the step `front ends` of a start without them takes no time."""
    Process(tmp_path).become_ready(20)
    first = Process(tmp_path, front_ends=4)
    assert first.progress.seconds_left == 0.0
    first.now += 18
    first.progress.enter(Phase.WARM_UP)
    first.progress.enter(Phase.ENGINE)  # as the group does
    first.progress.enter_step("front ends", {})
    first.become_ready(12)
    second = Process(tmp_path, front_ends=4)
    second.now += 18
    second.progress.enter(Phase.WARM_UP)
    second.progress.enter(Phase.ENGINE)
    second.progress.enter_step("front ends", {})
    assert second.progress.seconds_left == 12.0
    assert Process(tmp_path, front_ends=2).progress.seconds_left == 0.0
    assert Process(tmp_path).progress.seconds_left == 20.0


def test_start_of_another_method_is_estimated_by_its_own_kind(tmp_path: Path) -> None:
    """A spawned engine imports vLLM again."""
    Process(tmp_path).become_ready(6)
    Process(tmp_path, method="spawn").become_ready(13)
    assert Process(tmp_path, method="spawn").progress.seconds_left == 13.0
    assert Process(tmp_path).progress.seconds_left == 6.0


def test_start_that_is_too_short_is_not_kept(tmp_path: Path) -> None:
    """No one waits for it."""
    Process(tmp_path).become_ready(0.9)
    assert not (tmp_path / "lmi_vllm").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b"\xff", b'{"first_seconds": 1}', b"5",
     b'{"first_seconds": "1", "again_seconds": 2}', b'{"first_seconds": true, "again_seconds": 2}',
     b'{"first_seconds": NaN, "again_seconds": 2}', b'{"first_seconds": -1, "again_seconds": 2}',
     b'{"first_seconds": 1e300, "again_seconds": 2}', b"[" * 5000],
)  # fmt: skip
def test_content_that_is_bad_is_a_line_and_is_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """No estimate is better than a wrong one, and no start fails for it."""
    Process(tmp_path).become_ready(9)
    kept(tmp_path).write_bytes(content)
    process = Process(tmp_path)
    assert process.progress.seconds_left == 0.0
    assert f"not used: {kept(tmp_path)}" in caplog.text
    process.become_ready(7)
    assert Process(tmp_path).progress.seconds_left == 7.0


def test_folder_that_cannot_be_written_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that is full, or read-only."""
    process = Process(tmp_path)
    (tmp_path / "lmi_vllm").write_text("a file")
    with caplog.at_level(logging.INFO):
        process.become_ready(9)
    assert "are not kept" in caplog.text
