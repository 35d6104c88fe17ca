"""How long the way of a request through the code is: what a reader has to open to follow it."""

import sys
from pathlib import Path
from types import FrameType

import lmi_vllm
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import A, B, register

PACKAGE = Path(lmi_vllm.__file__).parent
FEATURES = PACKAGE / "features"  # which look on, and are not needed to follow it
MAX_FILES = 22  # one of them, inference/request/adapter_names.py, only where names are looked for


async def test_streamed_request_passes_few_files(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """From its headers to the line in the log, with an adapter; the engine's own files apart."""
    engine.script = (A, B)
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    await register(client, "fr")
    files, calls = set(), []

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and not path.is_relative_to(FEATURES):
            files.add(str(path.relative_to(PACKAGE)))
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        body = {"inputs": "x", "stream": True, "adapters": "fr"}
        answer = await (await client.post("/invocations", json=body)).read()
    finally:
        sys.setprofile(None)
    assert answer.count(b"\n") == 2
    assert calls.count("AdapterRegistry.hold") == 2  # begun and ended: taken once
    assert {"web/inference_routes.py", "inference/pipeline.py"} <= files
    assert len(files) <= MAX_FILES, sorted(files)
