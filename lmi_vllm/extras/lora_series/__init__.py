"""`vllm:lora_requests_info` as routers read it: one series, with the names that requests give."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.lora_series.series:showing_adapters"),
)
