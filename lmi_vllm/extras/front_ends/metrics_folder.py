"""The folder in which front-end processes keep their metrics; made before any are imported."""

import atexit
from collections.abc import Mapping

from lmi_vllm.engine.private_folders import new_private_folder


def variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what has prometheus_client keep its numbers in files, for all processes to add up.

    A folder of our own: what another server left in a folder would be counted.
    """
    if environ.get("LMI_FRONTEND_PROCESSES", "1").strip() == "1":
        return {}
    folder = new_private_folder("lmi-vllm-metrics-")
    atexit.register(folder.remove)  # holds its lock until then
    return {"PROMETHEUS_MULTIPROC_DIR": str(folder.path)}
