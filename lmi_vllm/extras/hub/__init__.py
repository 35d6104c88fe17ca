"""The Hugging Face hub: models and adapters by their hub ids, `owner/name`."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    repositories=Lazy("lmi_vllm.extras.hub.source:HUB"),
    serve_variables=(Lazy("lmi_vllm.extras.hub.location:fast_transfer"),),
)
