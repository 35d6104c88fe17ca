"""Code that was not there at the start: `option.entryPoint` as an address, and code of adapters."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import StartServer
from tests.support.adapter_files import copy_adapter
from tests.support.certificates import PemPair, make_pair

CODE = b"""
async def handle(inputs):
    from djl_python import Output
    return Output().add_as_json({"from": "afar"})
"""
ASK = {"inputs": "x"}


@contextmanager
def web_server(pair: PemPair | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve the code as /model.py, and nothing else; yields the address and what was asked."""
    asked: list[str] = []

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            is_there = self.path.startswith("/model.py")
            self.send_response(200 if is_there else 404)
            self.send_header("Content-Length", str(len(CODE) if is_there else 0))
            self.end_headers()
            if is_there:
                self.wfile.write(CODE)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as web:
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.certificate, pair.key)
            web.socket = context.wrap_socket(web.socket, server_side=True)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"{'http' if pair is None else 'https'}://127.0.0.1:{web.server_port}", asked
        web.shutdown()


def test_entry_point_is_fetched_once_and_kept(server_process: StartServer, tmp_path: Path) -> None:
    """Its handler answers; the next start needs the address no more; a query is never shown."""
    environ = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}
    with web_server() as (address, asked):
        environ["OPTION_ENTRYPOINT"] = f"{address}/model.py?signature=s3cr3t"
        first = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
        url = first.url_when_ready(60)
        assert call(url, "/invocations", ASK).json() == {"from": "afar"}
        assert asked == ["/model.py?signature=s3cr3t"]
        first.kill()
    second = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    url = second.url_when_ready(60)
    assert call(url, "/invocations", ASK).json() == {"from": "afar"}
    assert "s3cr3t" not in first.stderr + second.stderr


def test_entry_point_over_https_needs_a_known_certificate(
    server_process: StartServer, tmp_path: Path
) -> None:
    """A certificate without a known authority ends the start; with it the code is used."""
    pair = make_pair(tmp_path)
    with web_server(pair) as (address, asked):
        environ = {
            "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
            "OPTION_ENTRYPOINT": f"{address}/model.py",
        }
        arguments = ("--demo", "--port", "0", "--engine", "scripted")
        doubted = server_process(*arguments, environ=environ)
        assert doubted.wait_exit() == 1
        assert "certificate" in doubted.stderr.splitlines()[-1].lower()
        assert asked == []
        trusted = server_process(
            *arguments, environ=environ | {"SSL_CERT_FILE": str(pair.certificate)}
        )
        url = trusted.url_when_ready(60)
        assert call(url, "/invocations", ASK).json() == {"from": "afar"}


@pytest.mark.parametrize("kind", ["missing", "nobody", "forbidden"])
def test_entry_point_that_cannot_be_had_ends_the_start(
    server_process: StartServer, tmp_path: Path, kind: str
) -> None:
    """Exit code 1; the last line names the address and the reason."""
    with web_server() as (address, _):
        place = address if kind != "nobody" else "http://127.0.0.1:1"
        name = "other.py" if kind == "missing" else "model.py"
        reasons = {"missing": "404", "nobody": "refused", "forbidden": "LMI_CUSTOM_CODE=none"}
        environ = {
            "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
            "OPTION_ENTRYPOINT": f"{place}/{name}",
        }
        if kind == "forbidden":
            environ["LMI_CUSTOM_CODE"] = "none"
        server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
        assert server.wait_exit() == 1
    last = server.stderr.splitlines()[-1]
    assert f"{place}/{name}" in last
    assert reasons[kind] in last


def test_code_of_a_registered_adapter_is_not_run(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Whatever folder a client names, its model.py is refused by name; two settings allow it."""
    folder, proof = copy_adapter(tmp_path / "adapter"), tmp_path / "it-ran"
    (folder / "model.py").write_text(f"import pathlib\npathlib.Path({str(proof)!r}).touch()\n")
    ask = {"name": "x", "src": str(folder)}
    server = server_process("--demo", "--port", "0", "--engine", "scripted")
    answer = call(server.url_when_ready(60), "/adapters", ask)
    assert answer.status == 424
    assert "LMI_CUSTOM_CODE=roots" in answer.json()["message"]
    assert not proof.exists()
    environ = {"LMI_CUSTOM_CODE": "roots", "LMI_ADAPTER_ROOTS": str(tmp_path)}
    server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    answer = call(server.url_when_ready(60), "/adapters", ask)
    assert (answer.status, proof.exists()) == (200, True)
