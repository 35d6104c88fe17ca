"""A container whose memory is small: files that the kernel would drop are no used memory there.

The container is a control group (of version 1, as root), mounted in a namespace of its own. So
server and vLLM see what they see in a container.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from integration.bench.cold_weights import make_cold, write_model
from integration.client import call, wait_until
from integration.conftest import StartServer, clean_environment

GROUPS: Final = Path("/sys/fs/cgroup/memory")
LIMIT: Final = 3_400 << 20
LAYERS: Final = 8  # 1.1 GB of weights
ENTER: Final = """
echo $$ > "$0/cgroup.procs" && mount --bind "$0" /sys/fs/cgroup/memory && exec "$@"
"""
# What vLLM's worker asks, after the files were read.
ASKED: Final = """
import sys, pathlib
from vllm.utils.cpu_resource_utils import get_memory_node_info
for path in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    path.with_suffix(".copy").write_bytes(path.read_bytes())  # this group's, wherever the file is
print(get_memory_node_info(0).available_memory)
"""


@pytest.fixture
def container() -> Iterator[Sequence[str]]:
    """Return the beginning of a command that runs in a container of LIMIT bytes."""
    group = GROUPS / f"lmi-vllm-test-{os.getpid()}"
    if shutil.which("unshare") is None or not os.access(GROUPS / "cgroup.procs", os.W_OK):
        pytest.skip("needs unshare, and the right to make control groups of version 1")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT), encoding="ascii")
        yield ("unshare", "--mount", "sh", "-c", ENTER, str(group))
    finally:
        assert wait_until(lambda: not (group / "cgroup.procs").read_bytes(), 10)
        group.rmdir()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of random weights."""
    return write_model(tmp_path_factory.mktemp("small") / "model", LAYERS)


def weights(model: Path) -> int:
    """Return their bytes."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def test_plain_vllm_takes_files_for_used_memory(container: Sequence[str], model: Path) -> None:
    """On the machine itself it counts them as free."""
    make_cold(model, is_all=False)
    command = [*container, sys.executable, "-c", ASKED, str(model)]
    ran = subprocess.run(command, capture_output=True, env=clean_environment(), check=True)
    assert int(ran.stdout) < LIMIT - weights(model)


@pytest.mark.parametrize(
    "variable",
    [
        {"OPTION_KV_CACHE_MEMORY_BYTES": str(900 << 20)},  # beside weights, once more as files
        {"OPTION_GPU_MEMORY_UTILIZATION": "0.6"},  # of the container, beside weights as files
        {},
    ],
    ids=["size of the cache", "share", "default"],
)
def test_weights_in_memory_are_not_used_memory(
    container: Sequence[str], model: Path, server_process: StartServer, variable: dict[str, str]
) -> None:
    """They are read ahead and twice as large as what is left: the server starts and answers."""
    make_cold(model, is_all=False)  # what is in memory belongs to the group that has read it
    properties = model / "serving.properties"
    text = properties.read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if "kv_cache" not in line]
    properties.write_text("\n".join(kept), encoding="utf-8")
    named = ("--model", str(model), "--port", "0")
    server = server_process(*named, launcher=[*container, sys.executable], environ=variable)
    assert call(server.url_when_ready(), "/invocations", {"inputs": "hi"}).status == 200
    assert "weights: read ahead 1." in server.stderr
