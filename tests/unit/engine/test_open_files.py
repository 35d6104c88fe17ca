import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_vllm.engine.open_files import NEEDED, check_open_files
from lmi_vllm.errors import EngineStartError


@contextlib.contextmanager
def files_left(count: int) -> Iterator[None]:
    """Let the process open so many more files, in the body."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (its own descriptor counts, as there)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux")
@pytest.mark.parametrize("left", [0, 3, NEEDED - 1])
def test_open_files_that_do_not_suffice_are_named(left: int) -> None:
    """ZeroMQ would abort the process, with no line."""
    with files_left(left), pytest.raises(EngineStartError, match="files that this process may"):
        check_open_files()


def test_open_files_that_suffice_say_nothing() -> None:
    """A limit that is just enough, and the usual one."""
    with files_left(NEEDED + 1):
        check_open_files()
    check_open_files()
