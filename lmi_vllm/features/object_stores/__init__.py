"""Models and adapters in object stores: `s3://`; each further scheme is one more row."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.object_stores.s3 import S3, S3Settings

    c.settings(S3Settings)
    c.store(S3)
