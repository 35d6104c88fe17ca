"""`--engine scripted`: an engine that repeats the prompt, or follows the script of a test."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.scripted.engine import scripted_engines

    s.engines.named["scripted"] = scripted_engines
