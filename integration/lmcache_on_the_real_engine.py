"""vLLM with LMCache's own package: it starts and answers as without it. On a CPU it keeps nothing.

The package is a copy beside the development environment (integration/package_copies.py).
"""

import os
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import ServerProcess, StartServer
from integration.package_copies import NoPackageError, lmcache_copy

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
CONNECTOR = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
PROMPT = {"inputs": "The capital of France is"}  # shorter than a chunk: nothing is looked up
ANSWER = {"generated_text": " Paris. The city lies on the river Seine."}


def test_lmcache_is_loaded_and_answers_stay(server_process: StartServer, tmp_path: Path) -> None:
    """With the configuration file, an existing variable is warned of; the text is the engine's."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nlocal_cpu: true\nmax_local_cpu_size: 0.2\n", encoding="utf-8")
    server = _started(
        server_process,
        OPTION_KV_TRANSFER_CONFIG=CONNECTOR,
        OPTION_LMCACHE_CONFIG_FILE=str(file),
        LMCACHE_CONFIG_FILE="/nowhere.yaml",
    )
    answer = call(server.url_when_ready(), "/invocations", PROMPT).json()
    assert answer == ANSWER
    said = server.stderr
    assert "LMCache initialized" in said
    assert "no connector for a CPU" in said
    assert f"LMCACHE_CONFIG_FILE=/nowhere.yaml is overwritten with {file}" in said


def _started(server_process: StartServer, **environ: str) -> ServerProcess:
    try:
        paths = [str(lmcache_copy()), os.environ.get("PYTHONPATH", "")]
    except NoPackageError as error:
        pytest.skip(str(error))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return server_process("--demo", "--port", "0", environ=environ)
