"""The log level over HTTP: exact bodies and codes (docs/requests.md#management)."""

import logging
from collections.abc import Iterator

import pytest

from tests.conftest import ServeScripted


async def test_unknown_log_level_is_refused(serve: ServeScripted) -> None:
    """The answer names those that there are."""
    answer = await (await serve()).post("/server/logging?level=loud")
    body = await answer.json()
    levels = "trace, debug, info, warn, error, fatal, off"
    assert (answer.status, body["code"]) == (400, 400)
    assert body["message"] == f"level: expected one of {levels} (got loud)"


@pytest.fixture
def log_levels() -> Iterator[None]:
    """Give back the levels."""
    loggers = (logging.getLogger(), logging.getLogger("vllm"))
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("log_levels")
async def test_log_level_is_set(serve: ServeScripted) -> None:
    """Upstream's names; without one it is info."""
    client = await serve()
    for query, level in (("?level=ERROR", 40), ("?level=trace", 10), ("", 20), ("?level=off", 51)):
        answer = await client.post(f"/server/logging{query}")
        assert (await answer.read(), logging.getLogger().level) == (b'{"status":"OK"}\n', level)
