"""Models and adapters in object stores; each further scheme is one more row."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.object_stores.cloud_store import AZ, AZURE_LONG, GCS
    from lmi_vllm.features.object_stores.rules import check_urls
    from lmi_vllm.features.object_stores.s3 import S3, S3Settings
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(S3Settings)
    c.stores += (S3, GCS, AZ, AZURE_LONG)
    c.rules[RulePhase.WRITTEN].append(check_urls)
