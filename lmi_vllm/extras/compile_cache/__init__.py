"""What vLLM compiles, kept between containers."""

from typing import Final

from lmi_vllm.extension import Extra

EXTRA: Final = Extra()
