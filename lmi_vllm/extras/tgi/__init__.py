"""The routes of Text Generation Inference's clients, with `tgi_compat`."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    routes=(Lazy("lmi_vllm.extras.tgi.routes:GROUP"),),
)
