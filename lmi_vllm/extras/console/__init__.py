"""The web console: a page, and the data that it shows."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    listener_routes=(Lazy("lmi_vllm.extras.console.routes:console"),),
)
