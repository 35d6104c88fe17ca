"""Bounds on the decoded size of a request's media.

vLLM decodes images of up to 179 million pixels (VLLM_MAX_IMAGE_PIXELS), as many as a request has.
So the size is read from the head of the file first. Only formats are read whose head bounds what is
decoded, unless LMI_MEDIA_IMAGE_FORMATS has others: a TIFF has tiles larger than the image, an ICO
is decoded to be opened, and 1 KB of AVIF names 256 pixels and decodes 67 million.
Of a video it keeps 32 frames (with some models more), and decodes all frames before the last one.

A file that is a list of others is refused, and a sound of no finite numbers (`audio_files`).
Upstream: https://github.com/vllm-project/vllm/pull/47010 (images), 57525 (videos).
Releases: 0.31 and later.
Shows: a PNG of 656 KB takes a thread for 7 s and 1 GB, and the event loop stands still for 2.5 s.
    A video of 64 MB in one colour takes hours in one of the few threads that decode. 82 KB of
    silence as FLAC are 105 MB, up to VLLM_MAX_AUDIO_DECODE_BYTES for each file of a request.
May go: when test_plain_vllm_decodes_images_of_any_size_that_we_bound fails, and
    tests/contract/test_media_guard.py holds without it.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import pybase64
from PIL import Image, UnidentifiedImageError

from lmi_vllm.engine.vllm.workarounds.audio_files import check_finite, check_names_no_other
from lmi_vllm.messages import MediaPolicy
from lmi_vllm.telemetry.records import RequestRecord, current_record

IMAGES: Final = 4  # a request may have so many largest images, and so many largest audio files
FRAMES: Final = 256  # so many times the largest size for all of a video: 4 minutes of 1080p

# A scan of a progressive JPEG has 99 bytes and takes 85 ms of 64 million pixels. Common are ten.
MAX_SCANS: Final = 64
_SCAN: Final = b"\xff\xda"  # only markers have these bytes, of the pictures inside, too
_TILE_WIDTH: Final = 322  # TIFF's numbers of the two sides
_TILE_LENGTH: Final = 323


@dataclass(slots=True)
class MediaBudget:
    """Counts the pixels and the audio of one request; made where the request is known."""

    policy: MediaPolicy
    most_audio: int  # bytes of one file, decoded
    record: RequestRecord | None = field(default_factory=current_record)

    def bound(self, media_io: Any) -> Any:
        """Return a decoder of one file that is limited by the budget."""
        if hasattr(media_io, "audio_backend"):
            return BoundedMedia(media_io, self, self._decode_audio)
        is_visual = hasattr(getattr(media_io, "image_io", media_io), "image_mode")
        return BoundedMedia(media_io, self, self._decode_image_or_video) if is_visual else media_io

    def _decode_audio(self, _: Any, decode: Callable[[Any], Any], given: bytes | Path) -> Any:
        """A request that is over its budget decodes nothing more."""
        self.charge_audio(0)
        sound, rate = decode(given)
        self.charge_audio(sound.nbytes)
        check_finite(sound)
        return sound, rate

    def _decode_image_or_video(
        self, media_io: Any, decode: Callable[[Any], Any], given: bytes | Path
    ) -> Any:
        content = given.read_bytes() if isinstance(given, Path) else given
        if hasattr(media_io, "image_io"):
            self.charge_video(content, media_io.num_frames)
        else:
            self.charge(content)
        return decode(given)

    def charge(self, content: bytes) -> None:
        """Check that the image is within the budget.

        Raises:
            ValueError: vLLM's sign of a bad request: it is too large, or all of them are.
        """
        formats = self.policy.image_formats
        try:
            with Image.open(io.BytesIO(content), formats=formats) as image:
                pixels = _decoded_pixels(image)
                is_jpeg = image.format in ("JPEG", "MPO")
        except UnidentifiedImageError:
            raise ValueError(
                f"the image is not {', '.join(formats[:-1])} or {formats[-1]} "
                "(LMI_MEDIA_IMAGE_FORMATS), or is damaged"
            ) from None
        except Exception as error:  # parsers of untrusted bytes raise anything
            raise ValueError(f"the image cannot be read: {error}") from error
        self._charge(pixels, "the image")
        if is_jpeg and content.count(_SCAN) > MAX_SCANS:
            raise ValueError(f"the image is a JPEG of more than {MAX_SCANS} scans")

    def charge_video(self, content: bytes, wanted: int) -> None:
        """Check that an encoded video, of which so many frames are kept, is within the budget.

        Raises:
            ValueError: a frame, what is kept of them, or all of them are too large.
        """
        pixels, frames = _size_of_video(content)
        most = FRAMES * self.policy.max_pixels
        if pixels * frames > most:
            raise ValueError(
                f"the video has {frames} frames of {pixels} pixels; at most {most} pixels are "
                f"decoded, {FRAMES} times LMI_MEDIA_MAX_PIXELS"
            )
        self._charge(pixels, "a frame of the video", min(frames, max(wanted, 1)))

    def charge_audio(self, size: int) -> None:
        """Count so many bytes of decoded audio.

        Raises:
            ValueError: all audio of the request is too large.
        """
        if self.record is None:
            return
        most = IMAGES * self.most_audio
        self.record.decoded_audio += size
        if self.record.decoded_audio > most:
            raise ValueError(
                f"the audio of the request has more than {most} bytes when it is decoded, "
                f"{IMAGES} times VLLM_MAX_AUDIO_DECODE_BYTES"
            )

    def _charge(self, pixels: int, what: str, count: int = 1) -> None:
        most = self.policy.max_pixels
        if pixels > most:
            raise ValueError(
                f"{what} has {pixels} pixels; at most {most} are decoded (LMI_MEDIA_MAX_PIXELS)"
            )
        if self.record is None:
            return
        self.record.decoded_pixels += pixels * count
        if self.record.decoded_pixels > IMAGES * most:
            raise ValueError(
                f"the images and videos of the request have more than {IMAGES * most} pixels, "
                f"{IMAGES} times LMI_MEDIA_MAX_PIXELS"
            )


@dataclass(frozen=True, slots=True)
class BoundedMedia:
    """Decodes as vLLM's `media_io` does, within the budget.

    `decode_in_budget` gets `media_io`, its method that decodes, and what that method decodes.
    """

    media_io: Any
    budget: MediaBudget
    decode_in_budget: Callable[[Any, Callable[[Any], Any], Any], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.media_io, name)

    def load_bytes(self, content: bytes) -> Any:
        """Decode what a file holds."""
        check_names_no_other(content)
        return self._decoded(self.media_io.load_bytes, content)

    def _decoded(self, decode: Callable[[Any], Any], given: bytes | Path) -> Any:
        """Decode; what a decoder raises of untrusted bytes is the client's error."""
        try:
            return self.decode_in_budget(self.media_io, decode, given)
        except (ValueError, MemoryError, ImportError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and isinstance(given, Path):
                raise  # there is no such file
            raise ValueError(f"the media file cannot be read: {error}") from error

    def load_base64(self, media_type: str, text: str) -> Any:
        """Decode a data URL: a whole file, or the frames of a video with commas between."""
        if media_type.lower() != "video/jpeg" or not hasattr(self.media_io, "image_io"):
            return self.load_bytes(pybase64.b64decode(text, validate=True))
        most = self.media_io.num_frames
        for frame in text.split(",", most)[:most] if most > 0 else text.split(","):
            self.budget.charge(pybase64.b64decode(frame, validate=True))
        return self.media_io.load_base64(media_type, text)

    def load_file(self, path: Path) -> Any:
        """Decode a file."""
        return self._decoded(self.media_io.load_file, path)


def _decoded_pixels(image: Any) -> int:
    """Return the pixels that decoding makes; a TIFF decodes whole tiles, of any size."""
    tags = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    sides = (tags.get(_TILE_WIDTH, 0), tags.get(_TILE_LENGTH, 0))
    tile = prod(side if isinstance(side, int) else 0 for side in sides)
    return max(int(image.width * image.height), tile)


def _size_of_video(content: bytes) -> tuple[int, int]:
    """Return the pixels of a frame and the number of frames that its head names, or 0 and 0."""
    try:
        import cv2  # noqa: PLC0415 - of vLLM's, and only where there are videos

        stream: Any = io.BytesIO(content)  # OpenCV holds no reference, and reads it to its end
        head = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [])
        try:
            names = (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_COUNT)
            width, height, frames = (max(int(head.get(name)), 0) for name in names)
        finally:
            head.release()
    except Exception:  # noqa: BLE001 - parsers of untrusted bytes raise anything
        return 0, 0
    return width * height, frames
