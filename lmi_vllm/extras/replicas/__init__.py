"""One registry for all replicas: `option.adapters_state` in a store of objects."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.replicas.settings:ReplicaSettings"),),
    late_rules=(Lazy("lmi_vllm.extras.replicas.settings:check_state"),),
    lifespan=Lazy("lmi_vllm.extras.replicas.start:sharing_adapters"),
)
