"""Servers that have this feature's step."""

from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.features.text_embedding.requests import TextStep
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.support.assembled import load_settings


@pytest.fixture
def serve(serve: ServeScripted) -> ServeScripted:
    """Return a client of a server whose model was started without any option."""

    async def start(*arguments: Any, **words: Any) -> TestClient:
        client = await serve(*arguments, **words)
        TextStep(load_settings({})).add_to(client.app[SERVICE].runtime.steps)
        return client

    return start
