"""A finished start on one screen of the log, or as the fields of one JSON line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.start_summary.summary import summarizing

    s.model_parts.append(summarizing)
