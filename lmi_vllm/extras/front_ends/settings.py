"""What excludes several front-end processes, and the folder in which they keep their metrics."""

import atexit
import sys
from collections.abc import Callable, Mapping
from typing import Final

from lmi_vllm.config.listen import INFERENCE, PROCESSES, read_address
from lmi_vllm.config.settings import ExtraSettings, ServerSettings
from lmi_vllm.engine.private_folders import new_private_folder

MOST_PROCESSES: Final = 64


class FrontEndSettings(ExtraSettings):
    """The row is the core's, since other extras ask for it; what it excludes is said here."""

    def check(self, server: ServerSettings, fail: Callable[[str], None]) -> None:
        """Report what does not go together with several front-end processes."""
        setting = server.detail(PROCESSES)
        if setting is None or not isinstance(setting.value, int) or setting.value == 1:
            return
        if setting.value > MOST_PROCESSES:
            fail(f"{setting.stated}: at most {MOST_PROCESSES} are possible")
        if sys.platform != "linux":
            fail(f"{setting.stated}: only Linux spreads the connections of one port over processes")
        address = server.detail(INFERENCE)
        if address is not None and read_address(str(address.value)).path:
            fail(
                f"{setting.stated}: {address.stated} is a Unix socket, which one process can answer"
            )


def variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what has prometheus_client keep its numbers in files, for all processes to add up.

    Made before that is imported. A folder of our own: what another server left would be counted.
    """
    if environ.get(PROCESSES, "1").strip() == "1":
        return {}
    folder = new_private_folder("lmi-vllm-metrics-")
    atexit.register(folder.remove)  # holds its lock until then
    return {"PROMETHEUS_MULTIPROC_DIR": str(folder.path)}
