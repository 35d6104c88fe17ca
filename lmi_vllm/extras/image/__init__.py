"""What our images run: `python -m lmi_vllm.extras.image`; it adds nothing to the server."""

from typing import Final

from lmi_vllm.extension import Extra

EXTRA: Final = Extra()
