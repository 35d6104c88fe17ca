"""Deployments of other servers, started: names, health, readiness and drain are as they expect."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.inference.lifecycle import State
from tests.server.conftest import PROMPT, Engines, Serving, Slow, until
from tests.support.certificates import make_pair
from tests.support.other_servers import DEPLOYMENTS, Deployment, started


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """What stands for the placeholders of a deployment: a model, an adapter, certificates."""
    ours = shutil.ignore_patterns("adapters", "serving.properties")
    model = shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model", ignore=ours)
    make_pair(tmp_path, "tls")
    adapter = DEMO_MODEL_DIR / "adapters" / "json"
    return {"model": str(model), "adapter": str(adapter), "tls": str(tmp_path)}


@pytest.mark.parametrize("row", DEPLOYMENTS, ids=lambda row: row.place)
async def test_what_its_platform_asks_is_answered(
    row: Deployment, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It serves under those names; /health and /ping are 200; the drain lasts as it says."""
    start = started(row, places)
    engines = Engines([Slow()])
    serving = Serving(engines, capsys)
    await serving.begin(dict(start.environ), replace(start.command_line, port=0))
    key = {"Authorization": f"Bearer {start.environ.get('VLLM_API_KEY', '')}"}
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False), headers=key)
    try:
        await serving.ready()
        assert serving.url.startswith(row.address.partition("://")[0] + "://0.0.0.0:")
        for path in ("/health", "/ping"):
            assert (await client.get(serving.url + path)).status == 200
        answer = await (await client.get(f"{serving.url}/v1/models")).json()
        # A scripted engine lists adapters alone; the base model is asked below and in integration/.
        adapters = {model["id"] for model in answer.get("data", [])}
        assert adapters | set(serving.served_names) == set(start.models)
        request = asyncio.create_task(client.post(f"{serving.url}/invocations", json=PROMPT))
        await until(lambda: serving.in_flight == 1)
        serving.stop.set()
        await serving.became(State.DRAINING)
        await serving.clock.advance(row.drain - 1)
        assert not request.done()
        await serving.clock.advance(2)
        assert (await request).status == 503
    finally:
        await client.close()
        await serving.close()
