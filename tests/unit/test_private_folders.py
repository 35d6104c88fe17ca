"""Private copies of adapters: kept while their server lives, gone after it."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

from lmi_vllm.private_folders import new_private_folder

MAKE_AND_DIE = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from lmi_vllm.private_folders import new_private_folder
folder = new_private_folder("lmi-vllm-adapters-")
(folder.path / "copy").write_text("weights")
os._exit(0)
"""


MAKE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from lmi_vllm.private_folders import new_private_folder
new_private_folder("lmi-vllm-adapters-").remove()
"""


MAKE_AND_END = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from pathlib import Path
from lmi_vllm.commands.serve import end_process
from lmi_vllm.private_folders import new_private_folder
held, gone = new_private_folder("lmi-vllm-adapters-"), new_private_folder("lmi-vllm-engine-")
outside = Path(sys.argv[1], "segment")
outside.touch()
held.note_outside([str(outside)])
gone.remove()
other = Path(sys.argv[1], "other")
other.mkdir()
foreign = (other / ".lock").open("wb")
end_process(0)
"""


@pytest.fixture
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the folders of a test lie in a place of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_new_private_folder_removes_those_of_killed_servers(temporary_root: Path) -> None:
    """No process holds the lock of a dead server's folder: the next start removes it."""
    subprocess.run([sys.executable, "-c", MAKE_AND_DIE, str(temporary_root)], check=True)
    (left,) = temporary_root.iterdir()
    folder = new_private_folder("lmi-vllm-adapters-")
    assert not left.exists()
    assert [entry.name for entry in temporary_root.iterdir()] == [folder.path.name]
    folder.remove()


def test_end_removes_the_folders_that_are_still_held(temporary_root: Path) -> None:
    """A second signal ends the server before its engine has left its folders."""
    subprocess.run([sys.executable, "-c", MAKE_AND_END, str(temporary_root)], check=True)
    assert [entry.name for entry in temporary_root.iterdir()] == ["other"]


def test_files_elsewhere_go_with_a_folder_that_is_removed(temporary_root: Path) -> None:
    """An engine that was killed leaves its semaphores; one that was not has removed them itself."""
    left = temporary_root / "sem.mp-1"
    left.touch()
    folder = new_private_folder("lmi-vllm-engine-")
    folder.note_outside([str(left), f"{left}.gone"])
    folder.remove()
    assert not left.exists()
    folder.remove()  # nothing is left to do


def test_new_private_folder_leaves_those_in_use(temporary_root: Path) -> None:
    """Two servers on one machine do not touch each other's copies."""
    first = new_private_folder("lmi-vllm-adapters-")
    second = new_private_folder("lmi-vllm-adapters-")
    assert first.path.is_dir()
    assert first.path != second.path
    with first, second:
        assert len(list(temporary_root.iterdir())) == 2
    assert list(temporary_root.iterdir()) == []
    first.remove()


def test_new_private_folder_does_not_wait_for_a_pipe(temporary_root: Path) -> None:
    """A pipe in the place of a lock would let every start wait for a writer without end."""
    left = temporary_root / "lmi-vllm-adapters-left"
    left.mkdir()
    os.mkfifo(left / ".lock")
    subprocess.run([sys.executable, "-c", MAKE, str(temporary_root)], check=True, timeout=20)
    assert not left.exists()


def test_new_private_folder_leaves_folders_of_others(
    temporary_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can make such names in the temporary directory: nothing there is opened."""
    foreign = temporary_root / "lmi-vllm-adapters-foreign"
    foreign.mkdir()
    (foreign / ".lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: foreign.stat().st_uid + 1)
    new_private_folder("lmi-vllm-adapters-").remove()
    assert (foreign / ".lock").exists()


def test_folders_of_servers_with_other_settings_are_removed(temporary_root: Path) -> None:
    """Whatever feature made them: a server without LoRA removes copies of adapters."""
    subprocess.run([sys.executable, "-c", MAKE_AND_DIE, str(temporary_root)], check=True)
    with new_private_folder("lmi-vllm-start-") as folder:
        assert [*temporary_root.iterdir()] == [folder.path]


OUTSIDE = """
import os, sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from lmi_vllm.private_folders import new_private_folder
new_private_folder("lmi-vllm-engine-").note_outside([sys.argv[2], sys.argv[2] + ".gone"])
os._exit(0)
"""


def test_files_elsewhere_go_with_the_folder_of_a_killed_server(
    temporary_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Shared memory of an engine whose processes were all killed."""
    left = tmp_path_factory.mktemp("shm") / "psm_1"
    left.touch()
    command = [sys.executable, "-c", OUTSIDE, str(temporary_root), str(left)]
    subprocess.run(command, check=True)
    assert left.exists()
    new_private_folder("lmi-vllm-adapters-").remove()
    assert not left.exists()


NOTED = """
import os, sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from lmi_vllm.private_folders import new_private_folder
folder = new_private_folder("lmi-vllm-engine-", notes_in=Path(sys.argv[2]))
folder.note_outside([sys.argv[2] + "/psm_1"])
"""


def test_notes_beside_the_files_outlive_temporary_files(
    tmp_path: Path, temporary_root: Path
) -> None:
    """A pod keeps /dev/shm when its container starts again, and not always its /tmp."""
    memory, first = tmp_path / "shm", tmp_path / "first"
    memory.mkdir()
    first.mkdir()
    left = memory / "psm_1"
    for end in ("os._exit(0)", "folder.remove()"):
        left.touch()
        command = [sys.executable, "-c", NOTED + end, str(first), str(memory)]
        subprocess.run(command, check=True)
        assert len([*memory.iterdir()]) == (2 if "_exit" in end else 0)
        assert left.exists() is ("_exit" in end)
        with new_private_folder("lmi-vllm-engine-", temporary_root, notes_in=memory):
            assert not left.exists()


def test_place_without_room_for_notes_is_done_without(tmp_path: Path) -> None:
    """They are in the folder then."""
    with new_private_folder("lmi-vllm-engine-", tmp_path, notes_in=tmp_path / "none") as folder:
        folder.note_outside(["/dev/shm/psm_1"])
        assert (folder.path / ".outside").read_text() == "/dev/shm/psm_1"


def test_another_place_keeps_its_other_folders(tmp_path: Path) -> None:
    """There the names of others may be anything: only those of the prefix are looked at."""
    other = tmp_path / "lmi-vllm-other"
    other.mkdir()
    (other / ".lock").touch()
    with new_private_folder(".unpacking-", tmp_path) as folder:
        assert {*tmp_path.iterdir()} == {folder.path, other}


def test_folder_that_is_being_made_is_left(
    temporary_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server that starts at the same moment finds no lock that is still free."""
    lock_file, begun = fcntl.flock, []

    def beside_another(lock: IO[bytes], operation: int) -> None:
        if not begun:
            begun.append(lock)
            with new_private_folder("lmi-vllm-other-"):
                pass
        lock_file(lock, operation)

    monkeypatch.setattr(fcntl, "flock", beside_another)
    with new_private_folder("lmi-vllm-") as folder:
        assert folder.path.exists()
