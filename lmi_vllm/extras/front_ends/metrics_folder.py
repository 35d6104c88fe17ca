"""The folder in which front-end processes keep their metrics; made before any are imported."""

import atexit
from pathlib import Path

from lmi_vllm.engine.private_folders import new_private_folder


def new_metrics_folder() -> Path:
    """Return a folder of our own: what is left in one that somebody else named would be counted."""
    folder = new_private_folder("lmi-vllm-metrics-")
    atexit.register(folder.remove)  # holds its lock until then
    return folder.path
