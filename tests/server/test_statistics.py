"""The engine is asked for its statistics by the server's clock (LMI_STATS_INTERVAL)."""

import pytest

from tests.server.conftest import Engines, Serve


@pytest.mark.parametrize(("interval", "times"), [("", 3), ("5", 6), ("0", 0)])
async def test_statistics_are_logged_at_the_interval(
    serve: Serve, engines: Engines, interval: str, times: int
) -> None:
    """Every 10 s, or as set; never with 0."""
    environ = {"LMI_STATS_INTERVAL": interval} if interval else {}
    server = await (await serve(**environ)).ready()
    for _ in range(30):
        await server.clock.advance(1)
    assert engines.started[0].logged_statistics == times


async def test_the_engine_that_serves_is_asked(serve: Serve, engines: Engines) -> None:
    """After a restart it is the new one."""
    server = await (await serve(SERVING_RETRY_THRESHOLD="1")).ready()
    engines.started[0].die()
    for _ in range(30):
        await server.clock.advance(1)
    first, second = engines.started
    assert first.logged_statistics <= 1
    assert second.logged_statistics >= 2
