"""Our program, whose further front ends are spawned while its engine is forked: to compare with."""

import sys

from lmi_vllm.cli import main
from lmi_vllm.engine.vllm import factory
from lmi_vllm.signals import end_on_signals

if __name__ == "__main__":
    assert "prometheus_client" not in sys.modules, "it would not know that processes share metrics"
    factory.why_not_forked = lambda: "it is compared with a forked one"
    end_on_signals(is_serving=True)
    main()
