"""`option.adapters_state`: adapters outlive the process, in a file or an object of replicas."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.adapters_state.settings:AdaptersStateSettings"),),
    late_rules=(Lazy("lmi_vllm.extras.adapters_state.settings:check_state"),),
    lifespan=Lazy("lmi_vllm.extras.adapters_state.start:keeping_adapters"),
)
