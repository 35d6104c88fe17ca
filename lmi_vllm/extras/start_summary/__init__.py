"""A finished start on one screen of the log, or as the fields of one JSON line."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.start_summary.summary:summarizing"),
)
