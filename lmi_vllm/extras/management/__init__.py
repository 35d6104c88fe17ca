"""LMI's management API: adapters, and the one model of the server, over HTTP."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    routes=(
        Lazy("lmi_vllm.extras.management.adapter_routes:GROUP"),
        Lazy("lmi_vllm.extras.management.model_routes:GROUP"),
    ),
    without_model=Lazy("lmi_vllm.extras.management.slot:ModelSlot"),
    lifespan=Lazy("lmi_vllm.extras.management.managed_model:describing"),
)
