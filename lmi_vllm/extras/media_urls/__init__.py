"""Media in messages: fetched from public addresses only, and decoded within bounds."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    media=Lazy("lmi_vllm.extras.media_urls.connector:guard_media"),
)
