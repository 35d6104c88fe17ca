"""Deferred answers in exact bytes, and how they are counted."""

import asyncio
from pathlib import Path

import pytest

from lmi_vllm.features.deferred.settings import DeferredSettings
from tests.conftest import ServeScripted
from tests.golden.dialogues import Dialogue, load_dialogues
from tests.support.assembled import load_settings
from tests.web.test_metrics import grown, key, samples

DIALOGUES = load_dialogues(Path(__file__).parent / "dialogues")


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=lambda dialogue: dialogue.name)
async def test_golden_dialogue_is_exact(serve: ServeScripted, dialogue: Dialogue) -> None:
    """Deferred results are answered with these bytes and headers."""
    await dialogue.check(await serve(dialogue.profile))


def test_settings_are_server_settings_of_the_environment() -> None:
    """`SERVING_*`, as for the core's own."""
    environ = {"SERVING_MEMORY_CACHE_CAPACITY": "5", "SERVING_CACHE_BATCH": "2"}
    settings = load_settings(environ)
    found = settings.feature(DeferredSettings)
    assert (found.memory_cache_capacity, found.cache_batch) == (5, 2)
    assert settings.warnings == ()


async def test_a_deferred_request_counts_its_tokens_when_it_ends(serve: ServeScripted) -> None:
    """Its token's answer is a request without any; what runs on is not another request."""
    client = await serve()
    before = await samples(client)
    headers = {"x-synchronous": "false"}
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
    await client.post("/invocations", json=body, headers=headers)
    tokens = key("lmi_generated_tokens_total", adapter="base")
    for _ in range(100):
        more = await grown(client, before)
        if more.get(tokens):
            break
        await asyncio.sleep(0.01)
    assert more[tokens] == 3
    labels = {"route": "/invocations", "dialect": "lmi", "adapter": "base", "status": "200"}
    assert more[key("lmi_requests_total", **labels)] == 1
