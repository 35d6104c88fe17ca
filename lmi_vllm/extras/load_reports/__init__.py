"""The engine's load in a header of the answer, for load balancers that ask for it (ORCA)."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    routes=(Lazy("lmi_vllm.extras.load_reports.reports:GROUP"),),
)
