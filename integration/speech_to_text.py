"""A model that only hears: it starts, and answers uploads by vLLM's own routes."""

import math
from typing import Any

import pytest

from integration.client import call
from integration.conftest import RunningServer
from tests.support.sagemaker_proxy import sagemaker_proxy

pytestmark = pytest.mark.vllm
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/sagemaker/aws4_request, x"
}
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


def test_sagemaker_reaches_the_route(speech_server: RunningServer) -> None:
    """A form through SageMaker's one path has the bytes of the direct route; adapters do not."""
    from tests.support.speech_model import tone  # noqa: PLC0415 (imports torch)

    form = _form(file=tone(), model=b"lmi", temperature=b"0", max_completion_tokens=b"4")
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    direct = call(speech_server.url, "/v1/audio/transcriptions", form, headers=kind)
    assert (direct.status, b"text" in direct.body) == (200, True)
    attributes = "X-Amzn-SageMaker-Custom-Attributes"
    named = {**kind, **SIGNED, attributes: "team=a,route=/v1/audio/transcriptions"}
    with sagemaker_proxy(speech_server.url) as url:
        answer = call(url, "/endpoints/demo/invocations", form, headers=named)
        assert (answer.status, answer.body) == (200, direct.body)
        stream = form.removesuffix(b"--x--\r\n") + _form(stream=b"true")
        answer = call(url, "/endpoints/demo/invocations-response-stream", stream, headers=named)
        assert b"transcription.chunk" in answer.body
        assert b"data: [DONE]" in answer.body
        adapter = {"name": "a", "src": "/a"}
        named = {**SIGNED, attributes: "route=/adapters"}
        answer = call(url, "/endpoints/demo/invocations", adapter, headers=named)
        assert (answer.status, answer.json()["OriginalStatusCode"]) == (424, 404)


def _form(**fields: bytes) -> bytes:
    """Return a body of multipart/form-data with the boundary `x`."""
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        % (name.encode(), b'; filename="a.wav"' if name == "file" else b"", text)
        for name, text in fields.items()
    ]
    return b"".join([*parts, b"--x--\r\n"])


@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
def test_upload_is_a_sound_of_its_own(speech_server: RunningServer, kind: str) -> None:
    """A list of other files, and samples that are no numbers, are the client's fault."""
    from tests.support.speech_model import wav_of_floats  # noqa: PLC0415 (imports torch)

    cases = {
        b"ffconcat version 1.0\nfile tone.wav\n": b"list of other files",
        wav_of_floats(math.nan, 1600): b"NaN or infinite",
        wav_of_floats(math.inf, 1600): b"NaN or infinite",
        wav_of_floats(0.5, 1600, rate=8000): b"vllm[audio]",  # the tests' packages lack it
    }
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    for file, reason in cases.items():
        form = _form(file=file, model=b"lmi", temperature=b"0", max_completion_tokens=b"4")
        answer = call(speech_server.url, f"/v1/audio/{kind}", form, headers=headers)
        assert (answer.status, reason in answer.body) == (400, True), answer.body


def test_text_is_refused(speech_server: RunningServer) -> None:
    """Such a model neither completes nor embeds."""
    assert call(speech_server.url, "/v1/completions", {"model": "lmi", "prompt": "x"}).status == 404
    assert call(speech_server.url, "/invocations", {"inputs": "x"}).status == 424
