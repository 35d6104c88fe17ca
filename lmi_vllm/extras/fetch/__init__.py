"""`fetch`: the server's own download as a verb, for images and init containers."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Verb

EXTRA: Final = Extra(
    verbs=MappingProxyType({"fetch": Verb("download a model", "lmi_vllm.extras.fetch.command")})
)
