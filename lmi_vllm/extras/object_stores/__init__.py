"""Models and adapters in object stores: `s3://`; each further scheme is one more row."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.object_stores.s3:S3Settings"),),
    stores=(Lazy("lmi_vllm.extras.object_stores.s3:S3"),),
)
