"""How many of our functions a request passes before the engine has it."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lmi_vllm
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import A, B

PACKAGE = Path(lmi_vllm.__file__).parent


@pytest.mark.parametrize(
    ("path", "body", "asks", "most"),
    [
        ("/invocations", {"inputs": "x", "stream": True}, "ScriptedEngine.generate", 95),
        ("/v1/completions", {"prompt": "x", "stream": True}, "ScriptedEngine.answer_openai", 65),
    ],
)
async def test_request_passes_few_calls(
    serve: ServeScripted,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    asks: str,
    most: int,
) -> None:
    """Each delays every request; counted is the second of a connection, as most are."""
    engine.script = (A, B)
    client = await serve(ServingProfile(model_name="demo"))
    await (await client.post(path, json=body)).read()
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        await (await client.post(path, json=body)).read()
    finally:
        sys.setprofile(None)
    assert calls.index(asks) <= most, calls[: calls.index(asks)]
