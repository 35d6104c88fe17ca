import asyncio
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.engine.scripted import ScriptedEngine
from lmi_vllm.inference.sessions import Sessions
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.golden.cases import Golden, load_golden
from tests.golden.dialogues import Exchange, Ids, load_dialogues

DIALOGUES = load_dialogues()


@pytest.mark.parametrize("case", load_golden(), ids=lambda case: case.name)
async def test_golden_answer_is_exact(
    serve: ServeScripted, engine: ScriptedEngine, case: Golden
) -> None:
    """Every example of the specification is answered with these bytes."""
    engine.script = case.script
    engine.openai_error = case.openai_error
    client = await serve(case.profile)
    response = await client.request(case.method, case.path, data=case.sent, headers=case.headers)
    assert (await response.read()).decode() == case.body.decode()
    assert (response.status, response.content_type) == (case.status, case.content_type)
    assert client.app[SERVICE].queue.in_flight == 0


@pytest.mark.parametrize(("profile", "steps"), DIALOGUES.values(), ids=DIALOGUES)
async def test_golden_dialogue_is_exact(
    serve: ServeScripted, tmp_path: Path, profile: dict[str, Any], steps: list[Exchange]
) -> None:
    """Sessions, deferred results and model management answer with these bytes and headers."""
    client = await serve(ServingProfile(**{"model_name": "demo", **profile}))
    client.app[SERVICE].sessions = Sessions(tmp_path / "sessions")
    ids = Ids()
    for step in steps:
        headers = {name: ids.fill(value) for name, value in step.headers.items()}
        answer = await client.request(step.method, step.path, data=step.sent, headers=headers)
        while answer.status == 202:  # deferred, and not begun
            await asyncio.sleep(0)
            answer = await client.request(step.method, step.path, data=step.sent, headers=headers)
        for name, value in step.answer_headers.items():
            ids.check(value, answer.headers.get(name, ""))
        ids.check(step.body, await answer.text())
        assert (answer.status, answer.content_type) == (step.status, step.content_type)
