"""While a model is fetched, `/ping`, the metrics and the log tell how far it is.

The hub is a server on loopback that holds back the second half of the weights.
"""

import threading
from pathlib import Path

from integration.client import call, wait_until
from integration.conftest import StartServer
from tests.support.hub_server import Repository, hub_server

WEIGHTS = bytes(40 << 20)  # the hub library writes pieces of 10 MiB


def test_progress_is_in_log_ping_and_metrics(server_process: StartServer, tmp_path: Path) -> None:
    """Half of the bytes are there: all three say so, and inference says which phase it is."""
    files = {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "model.safetensors": WEIGHTS,
    }
    total = len(WEIGHTS) + len(files["config.json"])
    held_back = 20 << 20
    with hub_server(acme__tiny=Repository(files)) as hub:
        hub.chunk_pause = threading.Event()
        environ = {"HF_MODEL_ID": "acme/tiny", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        environ |= {"HF_HUB_ENABLE_HF_TRANSFER": "1"}  # means HF_XET_HIGH_PERFORMANCE today
        server = server_process("--port", "0", environ=environ)
        url = server.wait_listening()

        def progress() -> dict[str, object]:
            (entry,) = call(url, "/ping").json().values()
            return dict(entry)

        arrived = total - held_back
        assert wait_until(lambda: progress().get("bytes") == arrived, 15), progress()
        entry = progress()
        assert entry["phase"] == "download"
        assert (entry["files"], entry["files_total"], entry["bytes_total"]) == (1, 2, total)
        metrics = call(url, "/metrics").body.decode().splitlines()
        gauges = dict(line.split() for line in metrics if line.startswith("lmi_download_"))
        assert float(gauges["lmi_download_bytes"]) == arrived
        assert float(gauges["lmi_download_bytes_expected"]) == total
        refused = call(url, "/invocations", {"inputs": "x"})
        assert refused.status == 503
        assert b"download phase" in refused.body
        assert wait_until(lambda: f'"bytes":{arrived}' in server.stderr, 15), server.describe()
        assert "hf_transfer" not in server.stderr, "the hub library did not see the new name"
        hub.chunk_pause.set()
