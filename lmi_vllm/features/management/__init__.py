"""LMI's management API: adapters, and the one model of the server, over HTTP."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.management.adapter_routes import GROUP as ADAPTERS
    from lmi_vllm.features.management.managed_model import describing
    from lmi_vllm.features.management.model_routes import GROUP as MODELS
    from lmi_vllm.features.management.slot import ModelSlot

    s.routes.groups += (ADAPTERS, MODELS)
    s.without_model.fill(ModelSlot)
    s.model_parts.append(describing)
