"""`distributed_executor_backend=ray`: vLLM's workers as actors of a Ray cluster, on CPU.

Ray is no dependency of ours: `pip install ray` first (2.60 was tried), else this is skipped. vLLM's
CPU platform refuses Ray, so a platform plugin of this file's pretends to be one that has GPUs, and
the cluster pretends to have two.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer, ServerProcess, StartServer, clean_environment
from integration.plain_model import plain_model
from integration.server_exit_cleans_up import are_gone, survivors

ray = pytest.importorskip("ray", reason="needs Ray, which is no dependency: pip install ray")
pytestmark = pytest.mark.vllm
ADDRESS, PORT = "127.0.0.1", 26379
START_SECONDS = 120.0
DISCONNECT_SECONDS = 60.0
PROMPTS = ("The capital of France is", "Once upon a time")
PLUGIN = """
from vllm.platforms.cpu import CpuPlatform


class PretendedPlatform(CpuPlatform):
    ray_device_key = "GPU"


def name():
    return "pretended_gpus.PretendedPlatform"
"""


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """What server and cluster need alike: the platform that pretends, and no authentication."""
    with TemporaryDirectory(prefix="lmi-ray-") as folder:  # Ray's sockets need a short path
        distribution = Path(folder) / "pretended_gpus-1.dist-info"
        distribution.mkdir()
        (Path(folder) / "pretended_gpus.py").write_text(PLUGIN)
        (distribution / "METADATA").write_text("Name: pretended-gpus\nVersion: 1\n")
        entry_point = "[vllm.platform_plugins]\npretended = pretended_gpus:name\n"
        (distribution / "entry_points.txt").write_text(entry_point)
        yield {
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
            "RAY_ADDRESS": f"{ADDRESS}:{PORT}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_HOST_IP": ADDRESS,
        }


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str]) -> Iterator[psutil.Process]:
    """A Ray of one node with two pretended GPUs; its process."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--node-ip-address", ADDRESS, "--port", str(PORT), "--num-gpus", "2"]
    command += ["--num-cpus", "4", "--include-dashboard", "false", "--disable-usage-stats"]
    command += ["--temp-dir", environ["RAY_TMPDIR"], "--object-store-memory", str(1 << 27)]
    surroundings = {k: v for k, v in clean_environment().items() if k != "RAY_ADDRESS"} | environ
    surroundings.pop("RAY_ADDRESS")
    process = subprocess.Popen(
        command, env=surroundings, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    head = psutil.Process(process.pid)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail("".join(said))
        yield head
    finally:
        children = head.children(recursive=True) if head.is_running() else []
        os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            if child.is_running():
                child.kill()
        process.wait()
        process.stdout.close()


def workers(cluster: psutil.Process) -> list[psutil.Process]:
    """The processes of Ray in which a worker of vLLM's runs."""
    return [
        process
        for process in cluster.children(recursive=True)
        if "RayWorkerProc" in " ".join(process.cmdline())
    ]


def tokens(url: str, prompt: str) -> list[int]:
    """Return the greedy tokens after `prompt`."""
    payload = {"inputs": prompt, "parameters": {"max_new_tokens": 6, "details": True}}
    answer = call(url, "/invocations", payload)
    assert answer.status == 200, answer.body
    return [token["id"] for token in json.loads(answer.body)["details"]["tokens"]]


def start(
    server_process: StartServer, environ: dict[str, str], model: Path
) -> tuple[ServerProcess, str]:
    """A ready server whose two tensor ranks are Ray's, and its URL."""
    options = {
        "OPTION_TENSOR_PARALLEL_DEGREE": "2",
        "OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "ray",
        "HF_MODEL_ID": str(plain_model(model)),
    }
    server = server_process("--port", "0", environ=environ | options)
    return server, server.url_when_ready()


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL", "a worker's death"])
def test_workers_of_ray_answer_as_one_and_end_with_the_server(
    server_process: StartServer,
    demo_server: RunningServer,
    cluster: psutil.Process,
    environ: dict[str, str],
    tmp_path: Path,
    ending: str,
) -> None:
    """Same tokens; however it ends, Ray keeps none of its actors."""
    server, url = start(server_process, environ, tmp_path / "model")
    assert [tokens(url, prompt) for prompt in PROMPTS] == [
        tokens(demo_server.url, prompt) for prompt in PROMPTS
    ]
    actors = workers(cluster)
    assert len(actors) == 2, [process.cmdline() for process in cluster.children(recursive=True)]
    everything = [*actors, *server.children()]
    if ending == "a worker's death":
        actors[1].kill()
        assert server.wait_exit() == 1, server.describe()
        assert "lmi-vllm: error: the engine process died" in server.stderr
    else:
        number = signal.Signals[ending]
        server.process.send_signal(number)
        assert server.wait_exit() == (0 if number is signal.SIGTERM else -9), server.describe()
    assert wait_until(lambda: are_gone(everything), DISCONNECT_SECONDS), survivors(everything)
