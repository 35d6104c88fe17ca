"""One model over several nodes: the leader, its followers, and their rendezvous."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    start_variables=(Lazy("lmi_vllm.extras.nodes.liveness:start_variables"),),
    run_modes=(Lazy("lmi_vllm.extras.nodes.follow:follower"),),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.nodes.cluster import ClusterSettings, put_cluster
    from lmi_vllm.translate.draft import RulePhase

    c.settings(ClusterSettings)
    c.rule(RulePhase.DEFAULTS, put_cluster)
