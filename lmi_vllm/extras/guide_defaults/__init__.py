"""Notes of `explain` on defaults that differ from LMI's guides."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    explained_note=Lazy("lmi_vllm.extras.guide_defaults.defaults:note_on_default"),
    explained_rows=Lazy("lmi_vllm.extras.guide_defaults.defaults:rows_of_defaults"),
)
