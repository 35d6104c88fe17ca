"""The web console."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(listener_routes=(Lazy("lmi_vllm.extras.console.routes:console"),))
