"""The server as a child of a replica: `cli` with the kernel's promise to end it with its parent.

The replica's process (deployment.py) starts it as `python -m`, with its own id and the words of the
command line.
"""

import sys

from lmi_vllm.engine.vllm.forks import end_with_parent
from lmi_vllm.signals import end_on_signals, ignore_users_signals

if __name__ == "__main__":
    end_on_signals(is_serving=True)
    ignore_users_signals()
    end_with_parent(int(sys.argv[1]))

    from lmi_vllm.cli import main

    main(["serve", *sys.argv[2:]])
