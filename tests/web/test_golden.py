import pytest

from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.golden.cases import Golden, load_golden


@pytest.mark.parametrize("case", load_golden(), ids=lambda case: case.name)
async def test_golden_answer_is_exact(
    serve: ServeScripted, engine: ScriptedEngine, case: Golden
) -> None:
    """Every example of the specification is answered with these bytes."""
    await answer_exactly(serve, engine, case)


async def answer_exactly(serve: ServeScripted, engine: ScriptedEngine, case: Golden) -> None:
    """Ask the case's question, and compare the answer byte by byte."""
    engine.script = case.script
    engine.openai_error = case.openai_error
    client = await serve(case.profile)
    response = await client.request(case.method, case.path, data=case.sent, headers=case.headers)
    assert (await response.read()).decode() == case.body.decode()
    assert (response.status, response.content_type) == (case.status, case.content_type)
    assert client.app[SERVICE].queue.in_flight == 0
