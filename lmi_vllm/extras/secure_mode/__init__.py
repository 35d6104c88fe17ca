"""The checks of SageMaker's secure mode."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.secure_mode.controls:SecureModeSettings"),),
    start_check=Lazy("lmi_vllm.extras.secure_mode.controls:start_violations"),
    adapter_check=Lazy("lmi_vllm.extras.secure_mode.controls:adapter_violations"),
)
