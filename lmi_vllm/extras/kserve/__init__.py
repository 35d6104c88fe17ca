"""KServe's Open Inference Protocol (v2) over HTTP."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    routes=(Lazy("lmi_vllm.extras.kserve.routes:GROUP"),),
)
