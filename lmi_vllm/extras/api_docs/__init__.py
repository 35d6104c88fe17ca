"""The OpenAPI description of the running server, and a page that shows it."""

from typing import Final

from lmi_vllm.extension import Extra

EXTRA: Final = Extra()
