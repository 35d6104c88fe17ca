"""One model over several nodes: the leader, its followers, and their rendezvous."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.nodes.cluster:ClusterSettings"),),
    placement_rules=(Lazy("lmi_vllm.extras.nodes.cluster:put_cluster"),),
    start_variables=(Lazy("lmi_vllm.extras.nodes.liveness:start_variables"),),
    run_modes=(Lazy("lmi_vllm.extras.nodes.follow:follower"),),
)
