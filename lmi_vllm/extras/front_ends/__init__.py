"""Several HTTP processes over one engine."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    processes=Lazy("lmi_vllm.extras.front_ends.group:front_end_group"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.front_ends.settings import FrontEndSettings

    c.settings(FrontEndSettings)
