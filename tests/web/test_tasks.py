"""Models that do not generate, where no feature answers for them."""

import pytest

from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted


@pytest.mark.parametrize("body", [{"inputs": "a"}, {"input": "a"}, {"prompt": "a"}])
async def test_request_to_generate_names_the_models_task(
    serve: ServeScripted, body: object
) -> None:
    """`/invocations` generates; vLLM's own routes are there in any case."""
    client = await serve(ServingProfile(model_name="demo", task="embed"))
    answer = await client.post("/invocations", json=body)
    assert answer.status == 424
    assert "this model is for embed, not for text generation" in await answer.text()
