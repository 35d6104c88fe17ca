"""Who exports: the server's first process writes, the others send it their lines."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi_vllm.clock import Clock
from lmi_vllm.errors import Fault
from lmi_vllm.server.context import ServerEvents, new_service
from tests.support.assembled import PARTS, load_settings
from tests.unit.conftest import Ended


async def tell(environ: Mapping[str, str], ended: Ended, sent: list[str] | None = None) -> None:
    """Run a server's exports around one failed request; further processes fill `sent`."""
    settings = load_settings(environ)
    service = new_service(settings, Clock())
    service.telemetry.send_line = None if sent is None else sent.append
    async with contextlib.AsyncExitStack() as features:
        for run in PARTS.lifespans:
            await features.enter_async_context(run(service, settings, environ, ServerEvents()))
        for observe in service.telemetry.observers:
            observe(ended(500, fault=Fault.ENGINE))


@pytest.fixture(autouse=True)
def _same_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root logger has no handler more after a test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers])


async def test_the_first_process_writes_the_file(tmp_path: Path, ended: Ended) -> None:
    """A failure of ours is a line of it."""
    await tell({"SM_TELEMETRY_LOG_REV_2022_12": str(tmp_path / "lines")}, ended)
    for handler in logging.getLogger().handlers:
        handler.flush()
    assert "EngineFailure:1 count" in (tmp_path / "lines").read_text()


async def test_a_further_process_sends_its_lines(tmp_path: Path, ended: Ended) -> None:
    """One process writes the file, where there is one."""
    sent: list[str] = []
    await tell({"SM_TELEMETRY_LOG_REV_2022_12": str(tmp_path / "lines")}, ended, sent)
    await tell({}, ended, sent)
    assert sent == ["ModelServerError: engine failure: 1 count"]
    assert not (tmp_path / "lines").exists()


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_last_emf_line_is_written_at_the_end(
    ended: Ended, capfd: pytest.CaptureFixture[str], is_on: bool
) -> None:
    """However long the interval is; unasked, none is."""
    await tell({"LMI_METRICS_EMF": str(is_on).lower()}, ended)
    assert ('"ServerError":1' in capfd.readouterr().out) == is_on
