"""`--engine scripted`: an engine that repeats the prompt, or follows the script of a test."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.scripted.engine import scripted_engines

    s.engine.named("scripted", scripted_engines)
