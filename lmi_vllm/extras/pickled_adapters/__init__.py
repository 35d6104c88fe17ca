"""Adapters whose weights are a pickle (`adapter_model.bin`): they become safetensors."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    pickled_weights=Lazy("lmi_vllm.extras.pickled_adapters.convert:convert"),
)
