"""vLLM with LMCache's own package: it starts and answers as without it. On a CPU it keeps nothing.

The package is large and has no place in the development environment: `pip install lmcache` beside
it (what is missing of its requirements is named when it is imported) runs this.
"""

import pytest

from integration.client import call
from integration.conftest import StartServer

pytest.importorskip("lmcache", reason="needs the package lmcache")
CONNECTOR = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
PROMPT = {"inputs": "The capital of France is"}  # shorter than a chunk: nothing is looked up


@pytest.mark.vllm
def test_lmcache_is_loaded_and_answers_stay(server_process: StartServer) -> None:
    """The connector is the real one, the text that of the engine alone."""
    environ = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2", "OPTION_KV_TRANSFER_CONFIG": CONNECTOR}
    server = server_process("--demo", "--port", "0", environ=environ)
    answer = call(server.url_when_ready(), "/invocations", PROMPT).json()
    assert answer == {"generated_text": " Paris. The city lies on the river Seine."}
    assert "LMCache initialized" in server.stderr
    assert "no connector for a CPU" in server.stderr
