"""One model over several nodes: the leader, its followers, and their rendezvous."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.nodes.cluster import ClusterSettings, put_cluster
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(ClusterSettings)
    c.rules[RulePhase.DEFAULTS].append(put_cluster)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.nodes.follow import follower
    from lmi_vllm.features.nodes.liveness import start_variables

    s.start.start_variables.append(start_variables)
    s.run_modes.append(follower)
