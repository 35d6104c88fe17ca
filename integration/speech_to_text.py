"""A model that only hears: it starts, and answers uploads by vLLM's own routes."""

from typing import Any

import pytest

from integration.client import call
from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
openai = pytest.importorskip("openai", reason="needs the openai SDK: make setup installs it")
pytest.importorskip("soundfile", reason="needs soundfile: make setup installs it")


@pytest.fixture(scope="module")
def upload() -> dict[str, Any]:
    """A second of a hum."""
    from tests.support.speech_model import tone  # noqa: PLC0415 (imports torch)

    more = {"max_completion_tokens": 4}
    return {"model": "lmi", "file": ("tone.wav", tone()), "temperature": 0, "extra_body": more}


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the SDK's translations
@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
def test_sdk_uploads(speech_server: RunningServer, upload: dict[str, Any], kind: str) -> None:
    """A multipart body is answered; an unknown model and a body without a file are refused."""
    with openai.OpenAI(base_url=f"{speech_server.url}/v1", api_key="none", max_retries=0) as client:
        route = getattr(client.audio, kind)
        assert isinstance(route.create(**upload).text, str)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            route.create(**{**upload, "model": "other"})
    boundary = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = call(speech_server.url, f"/v1/audio/{kind}", b"--x--\r\n", headers=boundary)
    assert (answer.status, b"file" in answer.body) == (400, True)


def test_transcription_streams(speech_server: RunningServer, upload: dict[str, Any]) -> None:
    """Events to the last one, in OpenAI's framing."""
    with openai.OpenAI(base_url=f"{speech_server.url}/v1", api_key="none", max_retries=0) as client:
        asked = client.audio.transcriptions.with_streaming_response.create(**upload, stream=True)
        with asked as answer:
            lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"object":"transcription.chunk"' in lines[0]


def test_text_is_refused(speech_server: RunningServer) -> None:
    """Such a model neither completes nor embeds."""
    assert call(speech_server.url, "/v1/completions", {"model": "lmi", "prompt": "x"}).status == 404
    assert call(speech_server.url, "/invocations", {"inputs": "x"}).status == 424
