"""Notes of `explain` on defaults that differ from LMI's guides."""

from typing import Final

from lmi_vllm.extension import Explained, Extra, Lazy

EXTRA: Final = Extra(
    explained=Explained(
        note=Lazy("lmi_vllm.extras.guide_defaults.defaults:note_on_default"),
        rows=Lazy("lmi_vllm.extras.guide_defaults.defaults:rows_of_defaults"),
    )
)
