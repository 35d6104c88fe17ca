"""A finished start on one screen of the log, or as the fields of one JSON line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.start_summary.summary import summarizing

    s.model_part(summarizing)
