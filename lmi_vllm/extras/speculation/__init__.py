"""Speculative decoding: LMI's names and vLLM's older ones, and the draft model that is fetched."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.speculation.rules:SpeculationSettings"),),
    rules=(Lazy("lmi_vllm.extras.speculation.rules:configure"),),
    late_rules=(Lazy("lmi_vllm.extras.speculation.rules:check_draft_degree"),),
    additional_downloads=(Lazy("lmi_vllm.extras.speculation.rules:fetch_draft"),),
)
