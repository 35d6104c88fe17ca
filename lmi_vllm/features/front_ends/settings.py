"""Settings that exclude several front-end processes, and the folder of their metric files."""

import atexit
import sys
from collections.abc import Callable, Mapping
from typing import Final

from lmi_vllm.config.listen import PROCESSES, read_address
from lmi_vllm.config.settings import FeatureSettings, ServerSettings
from lmi_vllm.private_folders import new_private_folder
from lmi_vllm.sources.table import Sources

MAX_PROCESSES: Final = 64


class FrontEndSettings(FeatureSettings):
    """Checks of LMI_FRONTEND_PROCESSES, which the core declares since other features read it."""

    def check(self, server: ServerSettings, sources: Sources, fail: Callable[[str], None]) -> None:
        """Report settings that exclude several front-end processes."""
        count = server.lmi_frontend_processes
        if count == 1:
            return
        setting = server.details.lmi_frontend_processes
        if count > MAX_PROCESSES:
            fail(f"{setting.stated}: at most {MAX_PROCESSES} are possible")
        if sys.platform != "linux":
            fail(f"{setting.stated}: only Linux spreads the connections of one port over processes")
        if read_address(server.inference_address).path:
            address = server.details.inference_address.stated
            fail(f"{setting.stated}: {address} is a Unix socket, which one process can answer")


def variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return PROMETHEUS_MULTIPROC_DIR, with which processes share metric files; {} for one process.

    Call it before prometheus_client is imported. The folder is new: files that another server left
    would be counted.
    """
    if environ.get(PROCESSES, "1").strip() == "1":
        return {}
    folder = new_private_folder("lmi-vllm-metrics-")
    atexit.register(folder.remove)  # holds its lock until then
    return {"PROMETHEUS_MULTIPROC_DIR": str(folder.path)}
