"""vLLM's two arguments for the log of requests."""

import logging

import pytest

from tests.server.conftest import Engines, Serve, Serving


async def asked(server: Serving) -> None:
    """Send a probe, a scrape, a look at the models and a request."""
    assert (await server.ask("GET", "/ping?a=1")).status == 200
    assert (await server.ask("GET", "/metrics")).status == 200
    assert (await server.ask("GET", "/models?a=1")).status == 200
    assert await server.infer() == 200


@pytest.mark.parametrize(
    ("environ", "logged"),
    [
        ({}, ["/models", "/invocations"]),
        ({"OPTION_DISABLE_ACCESS_LOG_FOR_ENDPOINTS": "/models,/other"}, ["/invocations"]),
        ({"OPTION_DISABLE_UVICORN_ACCESS_LOG": "true"}, []),
    ],
)
async def test_paths_without_a_line_in_the_log(
    serve: Serve,
    engines: Engines,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
    logged: list[str],
) -> None:
    """They are below info, whatever their query, as probes and scrapes always are."""
    caplog.set_level(logging.INFO, "lmi_vllm.requests")
    server = await (await serve(**environ)).ready()
    await asked(server)
    lines = [record for record in caplog.records if record.name == "lmi_vllm.requests"]
    paths = [record.__dict__["fields"]["route"] for record in lines]
    assert paths == logged


async def test_probe_that_fails_has_its_line(
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """Only successes are below info."""
    caplog.set_level(logging.INFO, "lmi_vllm.requests")
    engines.gate.clear()
    server = await serve()
    assert (await server.ask("GET", "/ping")).status == 503
    lines = [record for record in caplog.records if record.name == "lmi_vllm.requests"]
    assert [record.__dict__["fields"]["status"] for record in lines] == [503]
    engines.gate.set()
    await server.ready()
