"""Shared memory of CPU ranks is removed from its folder once every rank has it.

Each rank makes a segment of 4 MB in /dev/shm for sums over tensors, and opens those of the others.
Nothing removes them, however the engine ends. A file that is removed stays usable for those who
have mapped it (shm_unlink(3)), and goes with the last of them, also after SIGKILL.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: each start with tensor-parallel CPU ranks leaves 8.4 MB in /dev/shm, until it is full.
May go: when test_plain_vllm_leaves_the_segments_of_its_ranks fails.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path("/dev/shm")


def removed_once_joined(join: Callable[[Any], int]) -> Callable[[Any], int]:
    """Return the function that makes and joins the segments, which then removes this rank's.

    It ends with a barrier: by then every rank has opened them all.
    """

    def joined(group: Any) -> int:
        handle = join(group)
        name = f"{group.group_name}_{group.communicator.rank}"
        with contextlib.suppress(OSError):  # another system keeps them elsewhere
            (_FOLDER / name).unlink()
        return handle

    return joined
