"""When several front-end processes are possible (LMI_FRONTEND_PROCESSES)."""

import sys
from collections.abc import Callable, Mapping
from typing import Final

from lmi_vllm.config.listen import INFERENCE, read_address
from lmi_vllm.config.resolved import Setting

NAME: Final = "LMI_FRONTEND_PROCESSES"
MOST: Final = 64


def check_front_ends(server: Mapping[str, Setting], fail: Callable[[str], None]) -> None:
    """Report what does not go together with several front-end processes."""
    setting = server.get(NAME)
    if setting is None or not isinstance(setting.value, int) or setting.value == 1:
        return
    if setting.value > MOST:
        fail(f"{setting.stated}: at most {MOST} are possible")
    if sys.platform != "linux":
        fail(f"{setting.stated}: only Linux spreads the connections of one port over processes")
    address = server.get(INFERENCE)
    if address is not None and read_address(str(address.value)).path:
        fail(f"{setting.stated}: {address.stated} is a Unix socket, which one process can answer")
