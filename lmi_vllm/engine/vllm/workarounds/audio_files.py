"""What an audio file may hold: sound of its own, in finite numbers.

Lists. FFmpeg opens the files and streams that a list in a file's place names (concat, HLS, SDP,
DASH). Media of messages are looked at by the feature media_urls, uploads to the routes of speech
here.

Numbers. A sound of NaN or infinite numbers makes the model's numbers so. The request failed as if
the server were at fault, and the watchdog repeated its warm-up.

Packages. Without `vllm[audio]` vLLM calls a sound of another rate than the model's invalid.

Upstream: https://github.com/vllm-project/vllm/pull/57525 (of videos).
Releases: 0.31 and later.
Shows: with PyAV a list of two lines, uploaded to `/v1/audio/transcriptions`, has a sound of the
    server's working directory transcribed. 90 bytes of SDP open UDP sockets, and hold one of the
    two threads that decode for 20 s. A WAV of NaN is 500, "list index out of range".
May go: when test_plain_vllm_decodes_what_an_upload_names and
    test_plain_vllm_hands_a_sound_of_no_numbers_on fail.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

# What FFmpeg knows other files and streams by, which it then opens: concat, HLS, SDP and DASH.
_ELSEWHERE: Final = (b"ffconcat", b"#extm3u", b"c=in ip", b":dash:")
_PROBED: Final = 1 << 20  # bytes of a file that FFmpeg looks at
# How files of sound begin: WAV and AIFF, OGG, FLAC, MP3, and MP4 or M4A after four bytes.
_SOUNDS: Final = (b"RIFF", b"FORM", b"OggS", b"fLaC", b"ID3", b"\xff\xf3", b"\xff\xfb")
_MP4: Final = b"ftyp"
_UNREAD: Final = (
    "the audio cannot be read: it is broken, or of a kind or a rate that needs vLLM's packages "
    "for audio (vllm[audio]), which this server does not have"
)


def check_names_no_other(content: bytes) -> None:
    """Check that a media file is no list of others.

    Raises:
        ValueError: vLLM's sign of a bad request.
    """
    head = content[:_PROBED].lower()
    if any(mark in head for mark in _ELSEWHERE):
        raise ValueError("the media file is a list of other files, or names a stream")


def check_finite(sound: Any) -> None:
    """Check that all samples of a decoded sound are numbers.

    Raises:
        ValueError: vLLM's sign of a bad request.
    """
    if not np.isfinite(sound).all():
        raise ValueError("the audio has samples that are NaN or infinite")


def _is_sound(content: bytes) -> bool:
    return content.startswith(_SOUNDS) or content[4:8] == _MP4


def checked(decode: Callable[[Any, bytes], Any]) -> Callable[[Any, bytes], Any]:
    """Return vLLM's method that decodes an upload, with the checks before and after it."""

    @functools.wraps(decode)
    def decoded(self: Any, audio_data: bytes) -> Any:
        check_names_no_other(audio_data)
        try:
            chunks, seconds = decode(self, audio_data)
        except ValueError as error:
            if isinstance(error.__cause__, ImportError) and _is_sound(audio_data):
                raise ValueError(_UNREAD) from error
            raise
        for chunk in chunks:
            check_finite(chunk)
        return chunks, seconds

    return decoded
