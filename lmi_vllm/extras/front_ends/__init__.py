"""Several HTTP processes over one engine."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    serve_variables=(Lazy("lmi_vllm.extras.front_ends.metrics_folder:variables"),),
    processes=Lazy("lmi_vllm.extras.front_ends.group:several"),
)
