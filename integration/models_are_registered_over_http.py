"""A server that starts without a model: POST /models loads one, DELETE makes room for the next."""

import shutil
from pathlib import Path

import psutil
import pytest

from integration.client import call, wait_until
from integration.conftest import ServerProcess, StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.s3_server import BUCKET, s3_server

NONE = {"SAGEMAKER_MULTI_MODEL": "true"}
GREETING = {"inputs": "The capital of France is"}


def start(
    server_process: StartServer, folder: Path, *arguments: str, **more: str
) -> tuple[ServerProcess, str]:
    """Return a server without a model, and its URL."""
    environ = NONE | {"SERVING_MODEL_STORE": str(folder)} | more
    server = server_process("--port", "0", *arguments, environ=environ, is_forked=True)
    url = server.url_when_ready(30)
    return server, url


def test_model_is_registered_and_unregistered(server_process: StartServer, tmp_path: Path) -> None:
    """Every answer on the way, with the engine that repeats the prompt."""
    _, url = start(server_process, tmp_path / "store", "--engine", "scripted")
    assert (call(url, "/ping").status, call(url, "/ping").body) == (200, b"{}\n")
    assert call(url, "/models").body == b'{"models":[]}\n'
    missing = call(url, "/invocations", GREETING)
    assert (missing.status, missing.json()["message"]) == (
        400,
        "Parameter model_name is required.",
    )
    nowhere = call(url, f"/models?url={tmp_path}/nowhere", b"")
    assert (nowhere.status, nowhere.json()["type"]) == (404, "ModelNotFoundException")

    for name in ("first", "second"):
        new = {"url": str(DEMO_MODEL_DIR), "model_name": name, "job_queue_size": 9}
        answer = call(url, "/models", new)
        assert (answer.status, answer.json()) == (200, {"status": f'Model "{name}" registered.'})
        assert call(url, f"/models/{name}/invoke", GREETING).status == 200
        assert call(url, "/invocations", GREETING).status == 200
        assert call(url, "/invocations?model_name=other", GREETING).status == 404
        (shown,) = call(url, f"/models/{name}").json()[0]["models"]
        assert (shown["loadedAtStartup"], shown["queueSize"]) == (False, 9)
        assert call(url, "/models", new).json()["message"] == (
            f"Workflow {name} is already registered."
        )
        assert call(url, "/models", {**new, "model_name": "third"}).status == 507
        gone = call(url, f"/models/{name}", method="DELETE")
        assert gone.json() == {"status": f'Model or workflow "{name}" unregistered'}
        assert call(url, f"/models/{name}", method="DELETE").status == 404
        assert call(url, f"/models/{name}/invoke", GREETING).status == 404
        assert call(url, "/ping").body == b"{}\n"


def test_model_that_cannot_start_leaves_room_for_another(
    server_process: StartServer, tmp_path: Path
) -> None:
    """The reason is the answer; scheduled ones are 202, and the log has the reason."""
    _, url = start(server_process, tmp_path / "store", "--engine", "scripted")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((DEMO_MODEL_DIR / "config.json").read_text())
    (broken / "model.py").write_text("import nowhere\n")
    answer = call(url, f"/models?url={broken}", b"")
    assert answer.status == 400
    assert "No module named 'nowhere'" in answer.json()["message"]
    # What only shows when the file is run.
    (broken / "model.py").write_text("raise RuntimeError('nowhere to be found')\n")
    answer = call(url, f"/models?url={broken}", b"")
    assert answer.status == 500
    assert "nowhere to be found" in answer.json()["message"]
    scheduled = call(url, f"/models?url={broken}&synchronous=false", b"")
    assert scheduled.status == 202
    assert scheduled.json() == {"status": 'Model "broken" registration scheduled.'}
    assert wait_until(lambda: call(url, "/models").json() == {"models": []}, 20)
    assert call(url, f"/models?url={DEMO_MODEL_DIR}&model_name=m", b"").status == 200
    assert call(url, "/invocations", GREETING).status == 200


def test_model_on_the_real_engine_is_freed(server_process: StartServer, tmp_path: Path) -> None:
    """The second engine starts in the process of the first, whose processes are gone."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    server, url = start(server_process, tmp_path / "store")
    process = psutil.Process(server.process.pid)
    for name in ("one", "two"):
        new = {"url": str(DEMO_MODEL_DIR), "model_name": name}
        assert call(url, "/models", new, seconds=150).status == 200
        answer = call(url, f"/models/{name}/invoke", GREETING)
        assert answer.json()["generated_text"].startswith(" Paris")
        assert call(url, "/adapters").json()["adapters"][0]["name"] == "capitals"
        (engine,) = process.children()
        if name == "two":
            engine.suspend()  # it cannot end by itself: vLLM kills it, and does not wait for it
        assert call(url, f"/models/{name}", method="DELETE").status == 200
        assert not engine.is_running(), engine
        assert not process.children(), process.children()


def test_model_is_registered_from_s3(server_process: StartServer, tmp_path: Path) -> None:
    """An s3:// URL is fetched with its adapters, and named by its last part; no objects, 404."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    files = {
        f"models/tiny/{path.relative_to(DEMO_MODEL_DIR).as_posix()}": path.read_bytes()
        for path in DEMO_MODEL_DIR.rglob("*")
        if path.is_file()
    }
    with s3_server() as store:
        store.put(files)
        environ = store.environ | {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}
        _, url = start(server_process, tmp_path / "store", **environ)
        absent = call(url, "/models", {"url": f"s3://{BUCKET}/models/none/"})
        assert (absent.status, absent.json()["type"]) == (404, "ModelNotFoundException")
        assert "models/none" in absent.json()["message"]
        answer = call(url, "/models", {"url": f"s3://{BUCKET}/models/tiny/"}, seconds=150)
        assert answer.body == b'{"status":"Model \\"tiny\\" registered."}\n'
        assert "models/tiny/model.safetensors" in store.objects_sent
    answer = call(url, "/models/tiny/invoke", GREETING)
    assert answer.json()["generated_text"].startswith(" Paris")
    loud = call(url, "/invocations", {**GREETING, "adapters": "capitals"})
    assert loud.json()["generated_text"].startswith(" PARIS")
    assert call(url, "/models/tiny", method="DELETE").status == 200


def test_model_without_memory_for_it_is_507(server_process: StartServer, tmp_path: Path) -> None:
    """More than the machine has: 507 with the reason, from the real engine; room for another."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    _, url = start(server_process, tmp_path / "store")
    careful = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "careful"))
    (careful / "serving.properties").write_text("required_memory_mb=1073741824\n")
    refused = call(url, "/models", {"url": str(careful)})  # nothing is loaded first
    assert (refused.status, "required_memory_mb" in refused.json()["message"]) == (507, True)
    greedy = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "greedy"))
    with (greedy / "serving.properties").open("a", encoding="utf-8") as properties:
        properties.write("\noption.kv_cache_memory_bytes=1125899906842624\n")  # a pebibyte
    answer = call(url, "/models", {"url": str(greedy)}, seconds=150)
    assert (answer.status, answer.json()["type"]) == (507, "InsufficientMemoryException")
    assert "memory" in answer.json()["message"]
    assert call(url, "/models").body == b'{"models":[]}\n'
    assert call(url, "/models", {"url": str(DEMO_MODEL_DIR)}, seconds=150).status == 200
    assert call(url, "/invocations", GREETING).status == 200
