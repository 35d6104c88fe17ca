"""LMI_CACHE_URI: what one container compiled, the next one finds; nothing there can fail a start.

Each start has an empty disk: a HOME of its own, below which everything is cached.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from integration.client import call, wait_until
from integration.conftest import ServerProcess, StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.s3_server import BUCKET, s3_server

COMPILED = "vllm/torch_compile_cache/torch_aot_compile"
PROPERTIES = """
option.dtype=fp32
option.max_model_len={length}
option.kv_cache_memory_bytes=67108864
option.env=OMP_NUM_THREADS=1,VLLM_CPU_OMP_THREADS_BIND=nobind
option.enforce_eager={eager}
"""

PROMPTS = [
    "The moon is",
    "A",
    "The sea is blue and the sky is grey. " * 9,
    "The capital of France is",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The embedded model without its adapters, with which vLLM compiles nothing on a CPU."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=shutil.ignore_patterns("adapters"))
    return folder


class Containers:
    """Starts servers of one model over one store, each with an empty disk."""

    def __init__(self, start: StartServer, folder: Path, model: Path, environ: dict[str, str]):
        self._start = start
        self._folder = folder
        self._model = model
        self._environ = environ
        self._count = 0
        self.texts: list[str] = []  # what the last one answered

    def run(self, *, eager: bool, length: int = 512) -> tuple[ServerProcess, Path]:
        """Start one until it is ready and has answered; returns it and its disk."""
        self._count += 1
        disk = self._folder / f"disk-{self._count}"
        disk.mkdir()
        (self._model / "serving.properties").write_text(
            PROPERTIES.format(eager=str(eager).lower(), length=length), encoding="utf-8"
        )
        own = {"HOME": str(disk), "XDG_CACHE_HOME": str(disk / ".cache")}
        server = self._start(
            "--model", str(self._model), "--port", "0", environ=self._environ | own
        )
        url = server.url_when_ready()
        self.texts = answers(url)
        return server, disk


def answers(url: str) -> list[str]:
    """What the model says to prompts of several lengths, alone and together."""
    body = {"inputs": PROMPTS, "parameters": {"max_new_tokens": 20, "do_sample": False}}
    together = call(url, "/invocations", body)
    assert together.status == 200, together
    texts = [row["generated_text"] for row in together.json()]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        alone = call(url, "/invocations", {**body, "inputs": prompt})
        assert alone.json()["generated_text"] == text
    return texts


def said(server: ServerProcess, start: str) -> dict[str, Any]:
    """The one line of the log about the cache that begins so; waits until it is there."""
    beginning = f"compile cache: {start}"

    def found() -> list[dict[str, Any]]:
        return [line for line in server.log if line["message"].startswith(beginning)]

    assert wait_until(lambda: bool(found()), 30), server.describe()
    (line,) = found()
    return line


def step_figures(server: ServerProcess) -> set[str]:
    """What the summary of the start says of its step `compilation`."""
    (start,) = [line for line in server.log if "step_figures" in line]
    assert start["step_seconds"]["compilation"] > 0
    return {"compiled", "from_cache"} & start["step_figures"].keys()


def compiled_in(disk: Path) -> list[str]:
    """What vLLM has compiled, or found compiled, on a disk."""
    return sorted(path.name for path in disk.glob(f".cache/vllm/lmi_vllm/*/{COMPILED}/*"))


def headers_in(disk: Path) -> list[str]:
    """Inductor's precompiled C++ headers: 7 s of a start that makes them, 156 MB of an entry."""
    folder = ".cache/vllm/lmi_vllm/*/inductor/precompiled_headers"
    return sorted(path.name for path in disk.glob(f"{folder}/*.gch"))


@pytest.mark.vllm
def test_second_container_does_not_compile(
    server_process: StartServer, tmp_path: Path, model: Path
) -> None:
    """Over S3: the first saves; the second, on an empty disk, loads what the first compiled."""
    with s3_server() as bucket:
        environ = {
            **bucket.environ,
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*bucket.backend),  # the proxy only reads
            "AWS_EC2_METADATA_DISABLED": "true",
            "LMI_CACHE_URI": f"s3://{BUCKET}/caches",
        }
        containers = Containers(server_process, tmp_path, model, environ)
        first, first_disk = containers.run(eager=False)
        assert said(first, "nothing at")
        saved = said(first, "saved to")["compile_cache"]
        assert saved["bytes"] > 100_000
        assert "saved AOT compiled function" in first.stderr
        assert step_figures(first) == {"compiled"}
        texts = containers.texts
        first.kill()
        listed = bucket.client.list_objects_v2(Bucket=BUCKET)["Contents"]
        assert [entry["Key"] for entry in listed] == [f"caches/{saved['key']}.tar.gz"]

        second, second_disk = containers.run(eager=False)
        restored = said(second, "restored from")["compile_cache"]
        assert (restored["key"], restored["bytes"]) == (saved["key"], saved["bytes"])
        assert compiled_in(second_disk) == compiled_in(first_disk)
        assert headers_in(second_disk) == headers_in(first_disk) == []
        assert restored["bytes"] < 20_000_000
        assert "Directly load AOT compilation from path" in second.stderr
        assert "Compiling model again" not in second.stderr
        assert "saved AOT compiled function" not in second.stderr
        assert step_figures(second) == {"from_cache"}
        assert containers.texts == texts
        (after,) = bucket.client.list_objects_v2(Bucket=BUCKET)["Contents"]
        assert after["LastModified"] == listed[0]["LastModified"]


@pytest.mark.vllm
def test_entries_are_kept_apart_and_damage_is_survived(
    server_process: StartServer, tmp_path: Path, model: Path
) -> None:
    """In a folder: another key finds nothing; a damaged entry is a warning, and is replaced."""
    store = tmp_path / "store"
    containers = Containers(server_process, tmp_path, model, {"LMI_CACHE_URI": str(store)})
    first, disk = containers.run(eager=True)
    key = said(first, "saved to")["compile_cache"]["key"]
    first.kill()
    assert list(disk.glob(f".cache/vllm/lmi_vllm/{key}/vllm/modelinfos/*.json"))
    entry = store / f"{key}.tar.gz"
    assert list(store.iterdir()) == [entry]

    other, _ = containers.run(eager=True, length=256)
    assert key not in said(other, "nothing at")["message"]
    said(other, "saved to")
    other.kill()
    assert len(list(store.iterdir())) == 2

    entry.write_bytes(b"not an archive")
    third, _ = containers.run(eager=True)
    assert said(third, "NOT restored")["level"] == "WARNING"
    assert said(third, "saved to")["compile_cache"]["key"] == key
    assert entry.stat().st_size > 500


def test_secure_mode_refuses_compiled_code(server_process: StartServer, tmp_path: Path) -> None:
    """The start ends before anything is read; the last line names the setting."""
    environ = {
        "LMI_CACHE_URI": str(tmp_path),
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES",
    }
    server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    assert server.wait_exit(60) == 1
    assert "LMI_CACHE_URI is not allowed in secure mode" in server.stderr.splitlines()[-1]
