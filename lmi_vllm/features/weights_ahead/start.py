"""When weights are read ahead: from the moment the files are there until vLLM has read them."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.engine.vllm.start_steps import ORDER
from lmi_vllm.features.weights_ahead.files import file_system, weight_files
from lmi_vllm.features.weights_ahead.reading import ReadAhead
from lmi_vllm.features.weights_ahead.settings import WeightsAheadSettings
from lmi_vllm.host_memory import free_host_memory
from lmi_vllm.inference.start_progress import StartProgress
from lmi_vllm.server.start_parts import PlannedStart

logger = logging.getLogger(__name__)

SMALLEST: Final = 64 << 20  # bytes; less is read in no time
# vLLM reads ahead on these by itself once it loads; with its own `prefetch` on all.
_VLLM_READS: Final = ("nfs", "nfs4", "lustre")
# Their files may pass the cache by, and the kernel does not tell.
_UNKNOWN: Final = ("fuse", "virtiofs", "9p")
_STRATEGY: Final = "safetensors_load_strategy"


def begin(start: PlannedStart) -> threading.Thread | None:
    """Tell the start how large its weights are, and read them ahead in a thread of its own.

    Returns the daemon thread; None where there is nothing to do.
    """
    values, files = start.arguments.values, _files_of(start)
    try:
        sizes = tuple(file.stat().st_size for file in files)
    except OSError:  # a link to nothing: the engine has an error of its own for it
        sizes = ()
    start.progress.expect_weights(sizes)
    is_on = start.settings.feature(WeightsAheadSettings).lmi_read_ahead
    # With several nodes each reads a part that is not known here.
    if not is_on or sum(sizes) < SMALLEST or start.arguments.number("nnodes", 1) > 1:
        return None
    kind = file_system(files[0])
    vllm_reads = values.get(_STRATEGY) == "prefetch" or (
        values.get(_STRATEGY) is None and kind in _VLLM_READS
    )
    ahead = ReadAhead(
        files,
        wanted_by(start.progress, until="set-up" if vllm_reads else "weights"),
        free_host_memory,
        is_known_to_keep=not kind.startswith(_UNKNOWN),
    )
    thread = threading.Thread(target=ahead.run, name="lmi-vllm-read-ahead", daemon=True)
    thread.start()
    return thread


def _files_of(start: PlannedStart) -> Sequence[Path]:
    """Return the files that vLLM will read weights from, in its order."""
    values = start.arguments.values
    if "model_weights" in values or start.engine == "scripted":
        return ()
    load_format = str(values.get("load_format", "auto")).lower()
    return weight_files(Path(str(values.get("model"))), load_format)


def wanted_by(start: StartProgress, *, until: str) -> Callable[[int], bool]:
    """Return what says of a file's place whether it is worth reading.

    Not once the engine has read it, has come past the step `until`, or the start is over.
    """

    def is_wanted(place: int) -> bool:
        is_early = start.is_running and ORDER.get(start.step, 0) <= ORDER[until]
        return is_early and start.weight_files_read <= place

    return is_wanted
