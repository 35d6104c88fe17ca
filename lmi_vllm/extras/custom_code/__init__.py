"""`custom_code`: the user's own functions around requests, in a model.py or in an adapter's."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    custom_code=Lazy("lmi_vllm.extras.custom_code.start:CustomCodeLoader"),
)
