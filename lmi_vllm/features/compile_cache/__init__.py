"""Where compiled code is kept: folders of this user alone, and a cache between containers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.compile_cache.store import CompileCacheSettings

    c.settings.append(CompileCacheSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.compile_cache.start import kept_code

    s.start.around.append(kept_code)
