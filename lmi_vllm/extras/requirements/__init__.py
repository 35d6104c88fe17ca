"""A model's requirements.txt, installed before the engine starts."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    packages=Lazy("lmi_vllm.extras.requirements.packages:Requirements"),
)
