"""A model folder and flags of `vllm serve`: name, adapters, limits and end are as asked."""

import json
import shutil
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR

pytestmark = pytest.mark.vllm
ADAPTERS = DEMO_MODEL_DIR / "adapters"
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def test_flags_of_vllm_serve_start_this_server(server_process: StartServer, tmp_path: Path) -> None:
    """As KServe's template starts it, with its adapters as JSON."""
    model = tmp_path / "model"
    ours = shutil.ignore_patterns("adapters", "serving.properties")
    shutil.copytree(DEMO_MODEL_DIR, model, ignore=ours)
    adapter = {"name": "as-json", "path": str(ADAPTERS / "json"), "base_model_name": "assistant"}
    server = server_process(
        str(model), "--vllm-defaults", "--port", "0", "--dtype", "float32", "--max-model-len",
        "512", "--enforce-eager", "--kv-cache-memory-bytes", "64m", "--enable-lora", "--max-loras",
        "2", "--lora-modules", json.dumps(adapter), f"capitals={ADAPTERS / 'capitals'}",
        "--shutdown-timeout", "9", "--no-enable-prefix-caching",
        environ=THREADS,
    )  # fmt: skip
    url = server.url_when_ready().replace("0.0.0.0", "127.0.0.1")
    listed = call(url, "/v1/models").json()["data"]
    assert {row["id"] for row in listed} == {str(model), "as-json", "capitals"}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    payload = {"messages": question, "temperature": 0, "max_tokens": 20}
    base = call(url, "/v1/chat/completions", {**payload, "model": str(model)}).json()
    named = call(url, "/v1/chat/completions", {**payload, "model": "as-json"}).json()
    assert named["choices"][0]["message"]["content"].startswith('{"answer": "The capital')
    assert base["choices"][0]["message"]["content"] != named["choices"][0]["message"]["content"]
    assert call(url, "/v1/chat/completions", {**payload, "model": "other"}).status == 404
    too_long = call(url, "/v1/completions", {"model": str(model), "prompt": "x " * 600})
    assert (too_long.status, "512" in too_long.body.decode()) == (400, True)
    server.process.terminate()
    assert server.wait_exit(30) == 0
