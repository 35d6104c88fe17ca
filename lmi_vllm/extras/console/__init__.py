"""The web console."""

from typing import Final

from lmi_vllm.extension import Extra

EXTRA: Final = Extra()
