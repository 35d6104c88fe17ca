"""A model that only hears: it starts, and answers uploads by vLLM's own routes."""

from collections.abc import Iterator
from typing import Any

import pytest

from integration.client import call
from integration.conftest import RunningServer, running_server

pytestmark = pytest.mark.vllm
openai = pytest.importorskip("openai", reason="needs the openai SDK: make setup installs it")
pytest.importorskip("soundfile", reason="needs soundfile: make setup installs it")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A tiny Whisper; no other server of the suite hears."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.speech_model import whisper  # noqa: PLC0415 (imports torch)

    folder = whisper(tmp_path_factory.mktemp("speech") / "model")
    properties = "option.enforce_eager=true\noption.dtype=fp32\noption.max_num_seqs=4\n"
    (folder / "serving.properties").write_text(properties, encoding="utf-8")
    with running_server(folder.parent, "--model", str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def upload() -> dict[str, Any]:
    """A second of a hum."""
    from tests.support.speech_model import tone  # noqa: PLC0415 (imports torch)

    more = {"max_completion_tokens": 4}
    return {"model": "lmi", "file": ("tone.wav", tone()), "temperature": 0, "extra_body": more}


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the SDK's translations
@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
def test_sdk_uploads(server: RunningServer, upload: dict[str, Any], kind: str) -> None:
    """A multipart body is answered; an unknown model and a body without a file are refused."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        route = getattr(client.audio, kind)
        assert isinstance(route.create(**upload).text, str)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            route.create(**{**upload, "model": "other"})
    boundary = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = call(server.url, f"/v1/audio/{kind}", b"--x--\r\n", headers=boundary)
    assert (answer.status, b"file" in answer.body) == (400, True)


def test_transcription_streams(server: RunningServer, upload: dict[str, Any]) -> None:
    """Events to the last one, in OpenAI's framing."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = client.audio.transcriptions.with_streaming_response.create(**upload, stream=True)
        with asked as answer:
            lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"object":"transcription.chunk"' in lines[0]


def test_text_is_refused(server: RunningServer) -> None:
    """Such a model neither completes nor embeds."""
    assert call(server.url, "/v1/completions", {"model": "lmi", "prompt": "x"}).status == 404
    assert call(server.url, "/invocations", {"inputs": "x"}).status == 424
