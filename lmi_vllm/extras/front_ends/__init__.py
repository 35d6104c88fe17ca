"""Several HTTP processes over one engine."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.front_ends.settings:FrontEndSettings"),),
    serve_variables=(Lazy("lmi_vllm.extras.front_ends.settings:variables"),),
    processes=Lazy("lmi_vllm.extras.front_ends.group:front_end_group"),
)
