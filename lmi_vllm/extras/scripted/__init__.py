"""`--engine scripted`: an engine that repeats the prompt, or follows the script of a test."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    named_engines=MappingProxyType(
        {"scripted": Lazy("lmi_vllm.extras.scripted.engine:scripted_engines")}
    ),
)
