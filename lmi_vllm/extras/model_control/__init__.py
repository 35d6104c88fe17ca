"""Registering models by HTTP: POST, PUT and DELETE of `/models`, one model at a time."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    routes=(Lazy("lmi_vllm.extras.model_control.routes:GROUP"),),
    without_model=Lazy("lmi_vllm.extras.model_control.slot:ModelSlot"),
)
