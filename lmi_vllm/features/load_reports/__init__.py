"""The engine's load in a header of the answer, for load balancers that ask for it (ORCA)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.load_reports.reports import GROUP

    s.routes.groups.append(GROUP)
