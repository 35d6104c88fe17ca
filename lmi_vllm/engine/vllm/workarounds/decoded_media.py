"""What the images of a request may come to once they are decoded.

vLLM decodes images of up to 179 million pixels (VLLM_MAX_IMAGE_PIXELS), as many as a request has.
One such PNG is 656 KB, takes a thread for 7 s and 1 GB, and the event loop stands still for 2.5 s
of them. So the size is read from the head of the file first; an image that cannot be read is left
to vLLM to refuse. May go: when tests/contract/test_media_guard.py holds without it.
"""

import io
from dataclasses import dataclass, field
from typing import Any, Final

from PIL import Image

from lmi_vllm.messages import MediaPolicy
from lmi_vllm.telemetry.records import RequestRecord, current_record

IMAGES: Final = 4  # as many of the largest size may a request have


@dataclass(slots=True)
class PixelBudget:
    """Counts the pixels of one request; it is made where the request is known."""

    policy: MediaPolicy
    record: RequestRecord | None = field(default_factory=current_record)

    def bound(self, media_io: Any) -> Any:
        """Return vLLM's decoder of one image or video, which is held to the budget from now on."""
        decoder = getattr(media_io, "image_io", media_io)  # of a video's frames
        if hasattr(decoder, "image_mode"):
            decode = decoder.load_bytes

            def load_bytes(content: bytes) -> Any:
                self.charge(content)
                return decode(content)

            decoder.load_bytes = load_bytes
        return media_io

    def charge(self, content: bytes) -> None:
        """Return when the image is within the budget.

        Raises:
            ValueError: vLLM's sign of a bad request: it is too large, or all of them are.
        """
        try:
            with Image.open(io.BytesIO(content)) as image:
                pixels = image.width * image.height
        except Exception:  # noqa: BLE001 - whatever a parser makes of a stranger's bytes
            return
        most = self.policy.max_pixels
        if pixels > most:
            raise ValueError(
                f"the image has {pixels} pixels; at most {most} are decoded (LMI_MEDIA_MAX_PIXELS)"
            )
        if self.record is None:
            return
        self.record.decoded_pixels += pixels
        if self.record.decoded_pixels > IMAGES * most:
            raise ValueError(
                f"the images of the request have more than {IMAGES * most} pixels, {IMAGES} times "
                "LMI_MEDIA_MAX_PIXELS"
            )
