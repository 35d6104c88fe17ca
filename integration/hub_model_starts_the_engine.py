"""A hub id is fetched by us, through huggingface_hub itself, before the engine starts.

The hub is a server on loopback that speaks the hub's protocol; the engine then gets a local folder.
"""

from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.hub_server import Repository, hub_server

TOKEN = "hf_secret_token_for_tests"
NAMES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip


def environment(url: str, cache: Path) -> dict[str, str]:
    """Return what a container would be started with."""
    return {
        "HF_MODEL_ID": "acme/tiny",
        "HF_TOKEN": TOKEN,
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "OPTION_DTYPE": "fp32",
        "OPTION_ENFORCE_EAGER": "true",
        "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
        "OPTION_MAX_MODEL_LEN": "512",
    }


@pytest.mark.vllm
def test_gated_hub_model_is_fetched_then_served_offline(
    server_process: StartServer, tmp_path: Path
) -> None:
    """The first start fetches with the token, the second starts from the cache without a hub.

    That an engine needs no hub either: `models_without_network`.
    """
    files = {name: (DEMO_MODEL_DIR / name).read_bytes() for name in NAMES}
    repository = Repository(files, token=TOKEN, is_gated=True)
    with hub_server(acme__tiny=repository) as hub:
        first = server_process("--port", "0", environ=environment(hub.url, tmp_path))
        url = first.url_when_ready()
        answer = call(url, "/predictions/acme_tiny", {"inputs": "The capital of France is"})
        assert "Paris" in answer.json()["generated_text"]
        assert TOKEN not in first.stderr
        first.kill()
    gone = environment("http://127.0.0.1:9", tmp_path) | {"HF_HUB_OFFLINE": "1"}
    second = server_process("--port", "0", "--engine", "scripted", environ=gone)
    url = second.url_when_ready()
    assert call(url, "/ping").json() == {"acme_tiny": {"status": "Healthy"}}


def test_gated_hub_model_without_token_says_so(server_process: StartServer, tmp_path: Path) -> None:
    """Without a token the start fails, naming the model and the variable to set."""
    files = {name: (DEMO_MODEL_DIR / name).read_bytes() for name in NAMES}
    with hub_server(acme__tiny=Repository(files, token=TOKEN, is_gated=True)) as hub:
        environ = environment(hub.url, tmp_path)
        del environ["HF_TOKEN"]
        server = server_process("--port", "0", environ=environ)
        assert server.wait_exit(60) == 1, server.describe()
        reason = server.stderr.splitlines()[-1]
    assert "acme/tiny" in reason
    assert "HF_TOKEN" in reason
