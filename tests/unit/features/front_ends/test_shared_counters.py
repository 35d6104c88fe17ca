"""The counters that front-end processes share: sums over rows, and a limit that holds for all."""

import subprocess
import sys
from pathlib import Path

import pytest

from lmi_vllm.errors import OverloadError
from lmi_vllm.features.front_ends.shared_counters import SharedCounters
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from tests.support.queue import admitted


def sharing(counters: SharedCounters, row: int, limit: int) -> RequestQueue:
    """Return a queue of a healthy model that shares its slots."""
    lifecycle = Lifecycle()
    lifecycle.set_state(State.HEALTHY)
    return RequestQueue(lifecycle, limit, counters.row(row))


def test_rows_add_up_and_an_ended_process_frees_its_slots(tmp_path: Path) -> None:
    """Each process writes its own row; what one held is free when it has ended."""
    counters = SharedCounters(tmp_path / "counters", 3)
    assert (tmp_path / "counters").stat().st_blocks  # a hole on a full disk ends the process
    first, second = counters.row(0), counters.row(1)
    first.add(2)
    second.add(3)
    second.report_engine(4, 70)
    first.report_engine(1, 8)
    assert (first.total, second.running_requests, first.steps) == (5, 5, 78)
    assert second.silent_seconds < 5
    assert counters.row(2).silent_seconds > 0  # has never reported
    second.add_ends((5, 1, 0))
    second.clear()
    assert (first.total, first.running_requests, first.steps) == (2, 1, 78)
    second.add_ends((1, 0, 2))
    assert [*first.ends] == [6, 4, 2]  # with the three that it had
    counters.close()


def test_another_process_sees_the_board(tmp_path: Path) -> None:
    """It is a file that every process maps, reads and writes."""
    counters = SharedCounters(tmp_path / "counters", 2)
    counters.row(0).add(5)
    code = (
        "import sys; from pathlib import Path\n"
        "from lmi_vllm.features.front_ends.shared_counters import SharedCounters\n"
        "row = SharedCounters(Path(sys.argv[1]), 2).row(1); row.add(2); print(row.total)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "counters")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"
    assert counters.row(0).total == 7


async def test_the_limit_holds_for_all_processes_together(tmp_path: Path) -> None:
    """What one admits the other has not; a refusal takes no place."""
    counters = SharedCounters(tmp_path / "counters", 2)
    first, second = sharing(counters, 0, 3), sharing(counters, 1, 3)
    with admitted(first, 2), admitted(second):
        for queue in (first, second):
            with pytest.raises(OverloadError), admitted(queue):
                pass
            assert queue.in_flight == 3
    assert first.in_flight == 0
    with admitted(second, 3):
        pass


async def test_idle_is_when_all_processes_are(tmp_path: Path) -> None:
    """A drain waits for requests of the others, too."""
    counters = SharedCounters(tmp_path / "counters", 2)
    first, second = sharing(counters, 0, 3), sharing(counters, 1, 3)
    with admitted(second):
        assert not await first.wait_idle(0.05)
        await first.wait_own(5)  # nothing of its own
    assert await first.wait_idle(5)
