"""A prefix that a proxy leaves in front of paths: `option.root_path`."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    path_prefix=Lazy("lmi_vllm.extras.root_path.prefix:path_prefix"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.root_path.prefix import RootPathSettings

    c.settings(RootPathSettings)
