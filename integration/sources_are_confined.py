"""Adapter sources named at run time: only the operator's hub and S3 endpoints are ever contacted.

The server runs in a network namespace whose loopback also answers at 169.254.169.254, where clouds
keep the machine's credentials; no client may have the server connect there.
"""

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from integration.client import call
from integration.conftest import StartServer
from tests.support.adapter_files import copy_adapter
from tests.support.hub_server import hub_server
from tests.support.no_network import without_network
from tests.support.s3_server import KEYS

METADATA = "169.254.169.254"
# Source -> the status of its refusal (docs/adapters.md#status-codes).
REFUSED = {
    f"http://{METADATA}/latest/meta-data/": 409,
    f"https://{METADATA}/latest/": 409,
    f"ftp://{METADATA}/x": 409,
    f"gs://{METADATA}/x": 424,
    f"az://{METADATA}/x": 424,
    f"abfs://x@{METADATA}/x": 424,
    f"https://{METADATA}/x.blob.core.windows.net/x": 409,
    f"//{METADATA}/latest": 424,
    f"file://{METADATA}/latest": 424,
    f"http:/{METADATA}/latest": 424,
    f"S3://{METADATA}/x": 424,
    f"s3://{METADATA}/x": 424,
    f"s3://x@{METADATA}/x": 424,
    f"s3://{METADATA}:80/x": 424,
    f"s3://x#.{METADATA}/x": 424,
    f"s3://x?@{METADATA}/x": 424,
    f"{METADATA}/latest": 424,
    f"acme/{METADATA}": 424,
    "../../etc/passwd": 424,
    "{allowed}/../secret": 424,
    "file://{allowed}/../secret": 424,
    "file://{allowed}/%2e%2e/secret": 424,
    "{allowed}/link": 424,
    "{allowed}/good\0/../../secret": 424,
    "file://{allowed}/good%00": 424,
    "x" * 5000: 424,
}


@contextmanager
def counting_callers() -> Iterator[list[str]]:
    """Listen where the metadata service would be; yields who has connected."""
    subprocess.run(["ip", "address", "add", f"{METADATA}/32", "dev", "lo"], check=True)
    callers: list[str] = []
    with socket.create_server((METADATA, 80)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:
                    return
                callers.append(str(address))
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield callers
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_no_source_leads_to_the_metadata_service(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Each source is refused with its status, nothing is registered, and no host was called."""

    def body() -> None:
        allowed = tmp_path / "allowed"
        good = copy_adapter(allowed / "good")
        secret = copy_adapter(tmp_path / "secret")
        (allowed / "link").symlink_to(secret)
        with counting_callers() as callers, hub_server() as hub:
            environ = KEYS | {
                "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / "hub"), "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
                # Without these Google's and Azure's clients ask it themselves, for credentials.
                "GOOGLE_SKIP_SIGNATURE": "true", "AZURE_SKIP_SIGNATURE": "true",
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "LMI_ADAPTER_HUB": "true", "LMI_ADAPTER_ROOTS": str(allowed),
            }  # fmt: skip
            server = server_process(
                "--demo", "--port", "0", "--engine", "scripted", environ=environ
            )
            url = server.url_when_ready(60)
            found = {}
            for source in REFUSED:
                src = quote(source.replace("{allowed}", str(allowed)), safe="")
                found[source] = call(url, f"/adapters?name=x&src={src}", b"").status
            assert found == REFUSED
            path = str(secret)
            load = call(url, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
            assert load.status >= 400, load
            names = {entry["name"] for entry in call(url, "/adapters").json()["adapters"]}
            assert "x" not in names
            assert call(url, f"/adapters?name=x&src={good}", b"").status == 200
            assert callers == []
            # The trap itself works: a knock is heard.
            socket.create_connection((METADATA, 80)).close()
            while not callers:
                threading.Event().wait(0.01)

    without_network(body)
