"""Servers that are started as another one: name, adapters, limits and end are as asked."""

import json
import shutil
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.certificates import make_pair
from tests.support.other_servers import DEPLOYMENTS, Deployment, started

pytestmark = pytest.mark.vllm
ADAPTERS = DEMO_MODEL_DIR / "adapters"
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# What a machine without a GPU needs beside any of them, and a port that is free.
ON_A_CPU = {
    "OPTION_ENFORCE_EAGER": "true",
    "OPTION_DTYPE": "float32",
    "OPTION_KV_CACHE_MEMORY_BYTES": "64m",
    "SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:0",
}

# One of each kind of start; `tests/server` starts the others on a scripted engine.
ON_THE_ENGINE = (
    "kserve: the", "production-stack", "hyperpod", "aws: sagemaker_entrypoint.sh", "tgi",
)  # fmt: skip


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


@pytest.mark.parametrize(
    "row",
    [row for row in DEPLOYMENTS if row.place.startswith(ON_THE_ENGINE)],
    ids=lambda row: row.place,
)
def test_deployment_of_another_server(
    row: Deployment, server_process: StartServer, tmp_path: Path
) -> None:
    """Its names answer, each adapter with its own weights; no other name does; it ends in time."""
    ours = shutil.ignore_patterns("adapters", "serving.properties")
    model = shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model", ignore=ours)
    make_pair(tmp_path, "tls")
    places = {"model": str(model), "adapter": str(ADAPTERS / "json"), "tls": str(tmp_path)}
    start = started(row, places)
    port = ["--port", "0"] if row.words else []
    beside = {**start.environ, **THREADS, **ON_A_CPU}
    beside.pop("HOME", None), beside.pop("SAGEMAKER_BIND_TO_PORT", None)
    server = server_process(*start.words[1:], *port, environ=beside)
    url = server.url_when_ready().replace("0.0.0.0", "127.0.0.1")
    key = {"Authorization": f"Bearer {beside.get('VLLM_API_KEY', '')}"}
    listed = {model["id"] for model in call(url, "/v1/models", headers=key).json()["data"]}
    assert listed == set(start.models)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    payload = {"messages": question, "temperature": 0, "max_tokens": 20}
    answers = {
        name: call(url, "/v1/chat/completions", {**payload, "model": name}, headers=key).json()
        for name in start.models
    }
    texts = {name: answers[name]["choices"][0]["message"]["content"] for name in answers}
    assert texts.pop("sql", '{"answer": "The capital').startswith('{"answer": "The capital')
    assert set(texts.values()) == {"The capital of France is Paris."}
    for path in ("/health", "/ping"):
        assert call(url, path).status == 200
    if "MODEL_ID" in row.environ:
        answer = call(url, "/generate", {"inputs": "The capital of France is"})
        assert "generated_text" in answer.json()
    server.process.terminate()
    assert server.wait_exit(30) == 0
