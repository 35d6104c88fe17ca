"""`huggingface_hub.InferenceClient` against our process, in TGI mode and by default."""

from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
PROMPT = "The capital of France is"
SSE = {"Accept": "text/event-stream"}


def _check(client: Any) -> None:
    """What the client's users do: text and details, whole and streamed."""
    text = client.text_generation(PROMPT, max_new_tokens=6)
    assert text.startswith(" Paris")
    whole = client.text_generation(PROMPT, max_new_tokens=6, details=True)
    assert whole.generated_text == text
    assert whole.details.generated_tokens == len(whole.details.tokens) == 6
    assert all(isinstance(token.logprob, float) for token in whole.details.tokens)
    assert whole.details.finish_reason == "length"
    pieces = list(client.text_generation(PROMPT, max_new_tokens=6, stream=True))
    assert "".join(pieces) == text
    rows = list(client.text_generation(PROMPT, max_new_tokens=6, stream=True, details=True))
    assert [row.token.id for row in rows] == [token.id for token in whole.details.tokens]
    assert rows[-1].generated_text == text
    assert rows[-1].details.finish_reason == "length"
    assert rows[-1].details.generated_tokens == 6


def test_hub_client_in_tgi_mode(tgi_server: RunningServer) -> None:
    """In TGI mode the client works as with TGI, special tokens marked."""
    client = InferenceClient(model=f"{tgi_server.url}/invocations")
    _check(client)
    whole = client.text_generation(PROMPT, max_new_tokens=2, details=True)
    assert [token.special for token in whole.details.tokens] == [False, False]


@pytest.mark.parametrize("slash", ["", "/"])
def test_hub_client_on_tgi_s_own_route(tgi_server: RunningServer, slash: str) -> None:
    """`POST /`: the server's bare URL is all that a user of TGI gives."""
    client = InferenceClient(model=tgi_server.url + slash)
    _check(client)
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation(PROMPT, max_new_tokens=10**6)


def test_hub_client_by_default(demo_server: RunningServer) -> None:
    """By default too, once it asks for server-sent events: LMI's streams are JSON lines."""
    _check(InferenceClient(model=f"{demo_server.url}/invocations", headers=SSE))
    plain = InferenceClient(model=f"{demo_server.url}/invocations")
    assert plain.text_generation(PROMPT, max_new_tokens=6).startswith(" Paris")
    # The client skips every line that does not begin with "data:", and says nothing.
    assert list(plain.text_generation(PROMPT, max_new_tokens=6, stream=True)) == []


def test_hub_client_embeds(embedding_server: RunningServer) -> None:
    """Feature extraction gives a matrix of one row per text."""
    client = InferenceClient(model=f"{embedding_server.url}/invocations")
    assert client.feature_extraction("rain").shape == (1, 64)
