"""The Hugging Face hub: models and adapters by their hub ids, `owner/name`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.hub.source import HUB

    c.hub.fill(HUB)
