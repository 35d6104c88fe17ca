"""When a front-end process that has ended is replaced."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmi_vllm.features.front_ends.group import FrontEndGroup
from lmi_vllm.inference.lifecycle import State


@dataclass(frozen=True)
class Setup:
    """What a process is run with."""

    row: int = 0


@pytest.mark.parametrize("state", [State.HEALTHY, State.DRAINING])
async def test_process_that_ends_in_a_drain_is_not_replaced(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one would import vLLM for longer than the drain lasts."""
    caplog.set_level(logging.ERROR)
    started: list[str] = []

    async def run(_: Setup) -> None:
        """End at once."""

    def start_missing() -> tuple[()]:
        started.append("another")
        return ()

    process = SimpleNamespace(run=run, row=1, pid=7, ending="signal 9")
    row = SimpleNamespace(clear=lambda: None)
    group = SimpleNamespace(
        _setup=Setup(),
        _processes=[process],
        _join_message=object(),
        _clients=SimpleNamespace(counters=SimpleNamespace(row=lambda _: row), is_exhausted=False),
        _first=SimpleNamespace(state=lambda: SimpleNamespace(state=state)),
        _start_missing=start_missing,
    )
    await FrontEndGroup._run(cast("Any", group), cast("Any", process))
    assert started == (["another"] if state is State.HEALTHY else [])
    assert "front-end process 7 ended with signal 9" in caplog.text
