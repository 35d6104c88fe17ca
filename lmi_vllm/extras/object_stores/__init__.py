"""Models and adapters in stores of objects: `s3://`, and one row more for each further one."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.object_stores.s3:S3Settings"),),
    stores=(Lazy("lmi_vllm.extras.object_stores.s3:S3"),),
)
