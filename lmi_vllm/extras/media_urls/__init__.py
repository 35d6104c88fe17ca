"""Media URLs in messages: fetched from public addresses only, within bounds."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(media=Lazy("lmi_vllm.extras.media_urls.fetch:MediaClient"))
