"""`python -m lmi_vllm` is the same program as the console script `lmi-vllm`."""

import sys

from lmi_vllm.signals import end_on_signals, ignore_users_signals

if __name__ in ("__main__", "lmi_vllm.__main__"):  # not in a process of the engine's
    end_on_signals(is_serving=sys.argv[1:2] == ["serve"])
    ignore_users_signals()

from lmi_vllm.cli import main

if __name__ == "__main__":
    main()
