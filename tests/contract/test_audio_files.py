"""Uploads to the routes of speech are sounds of their own, in finite numbers."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
pytest.importorskip("soundfile", reason="needs soundfile: make setup installs it")

from vllm.entrypoints.speech_to_text.base import serving
from vllm.multimodal.media import AudioMediaIO

from lmi_vllm.engine.vllm.workarounds import Scope, apply
from lmi_vllm.features.media_urls.decoded import MediaBudget
from lmi_vllm.messages import MediaPolicy
from tests.support.speech_model import tone, wav_of_floats

pytestmark = pytest.mark.vllm
RATE = 16000
LIST = b"ffconcat version 1.0\nfile secret.wav\n"


@pytest.fixture
def handler() -> Any:
    """What vLLM's method reads of its handler."""
    sizes = {"max_audio_decode_duration_s": 600, "max_audio_decode_bytes": 1 << 28}
    speech = SimpleNamespace(sample_rate=RATE, allow_audio_chunking=False)
    return SimpleNamespace(asr_config=speech, **sizes)


def plain() -> Callable[[Any, bytes], Any]:
    """Return the method as it is now: plain vLLM's where nothing is replaced."""
    method: Callable[[Any, bytes], Any] = serving.SpeechToTextBaseServing._decode_and_chunk_speech
    return method


def ours() -> Callable[[Any, bytes], Any]:
    """Return the method of a handler that is made with vLLM's application."""
    with apply(Scope.APPLICATION):
        return plain()


def test_list_of_files_is_not_decoded(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything reads it."""
    monkeypatch.setattr(serving, "load_audio", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="a list of other files"):
        ours()(handler, LIST)


def test_plain_vllm_decodes_what_an_upload_names(
    handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`audio_files.py`: FFmpeg gets it, and opens what it names."""
    given: list[bytes] = []

    def load(file: Any, **_: object) -> Any:
        given.append(file.read())
        raise ValueError("read")

    monkeypatch.setattr(serving, "load_audio", load)
    with pytest.raises(ValueError, match="read"):
        plain()(handler, LIST)
    assert given == [LIST]


@pytest.mark.parametrize("sample", [math.nan, math.inf, -math.inf])
def test_sound_has_numbers(handler: Any, sample: float) -> None:
    """Of an upload, and of a message; a usual one is decoded."""
    with pytest.raises(ValueError, match="NaN or infinite"):
        ours()(handler, wav_of_floats(sample, RATE))
    media = MediaBudget(MediaPolicy(), 1 << 28).bound(AudioMediaIO())
    with pytest.raises(ValueError, match="NaN or infinite"):
        media.load_bytes(wav_of_floats(sample, RATE))
    chunks, seconds = ours()(handler, tone())
    assert (len(chunks), seconds) == (1, 1.0)


def test_plain_vllm_hands_a_sound_of_no_numbers_on(handler: Any) -> None:
    """`audio_files.py`: to the model, whose numbers are none then."""
    ((sound, *_), _) = plain()(handler, wav_of_floats(math.nan, RATE))
    assert math.isnan(sound[0])


def test_missing_package_is_named(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound of another rate is not called invalid."""

    def load(*_: object, **__: object) -> Any:
        raise ImportError("Please install vllm[audio]")

    monkeypatch.setattr(serving, "load_audio", load)
    with pytest.raises(ValueError, match="needs vLLM's packages for audio"):
        ours()(handler, wav_of_floats(0.5, RATE, rate=8000))
    for content in (b"", b"no sound"):  # in vLLM's words
        with pytest.raises(ValueError, match=r"^Invalid or unsupported audio file\.$"):
            ours()(handler, content)
