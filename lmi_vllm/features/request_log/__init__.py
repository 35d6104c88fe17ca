"""Which requests have a line in the log: vLLM's two arguments for its own server's log."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.request_log.settings import RequestLogSettings

    c.settings.append(RequestLogSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.request_log.settings import (
        choosing_lines,
        choosing_lines_of_model,
    )

    s.lifespans.append(choosing_lines)
    s.model_parts.append(choosing_lines_of_model)
