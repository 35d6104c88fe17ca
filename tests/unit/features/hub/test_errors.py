"""What the hub's library raises without a class of its own."""

import errno
from typing import Any

import pytest

from lmi_vllm.features.hub.errors import translating
from lmi_vllm.sources.base import InterruptedTransferError

SOURCE: Any = None  # only answers of the hub name it
WRONG_SIZE = "Consistency check failed: file should be of size 8 but has size 4 (config.json)."


def test_file_of_the_wrong_size_is_fetched_again() -> None:
    """The library raises a plain OSError for it."""
    with pytest.raises(InterruptedTransferError, match="should be of size 8"), translating(SOURCE):
        raise OSError(WRONG_SIZE)


def test_error_of_the_disk_stays_what_it_is() -> None:
    """Another attempt would fill the disk again, whatever the file is called."""
    with pytest.raises(OSError, match="No space left") as raised, translating(SOURCE):
        raise OSError(errno.ENOSPC, "No space left", WRONG_SIZE)
    assert raised.value.errno == errno.ENOSPC
