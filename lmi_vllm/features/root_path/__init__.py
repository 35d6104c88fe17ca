"""A prefix that a proxy leaves in front of paths: `option.root_path`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.root_path.prefix import RootPathSettings

    c.settings.append(RootPathSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.root_path.prefix import path_prefix

    s.routes.prefix.fill(path_prefix)
