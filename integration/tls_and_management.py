"""A PEM pair gives TLS, a management address its own port, and keys guard every route on both."""

import http.client
import json
import re
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.client import call, wait_until
from integration.conftest import ServerProcess, StartServer
from lmi_vllm.assembly import create_app
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.request import OPEN_PATHS, Routes, WebOptions
from tests.support.certificates import CURVE, as_traditional, make_pair

ARGUMENTS = ("--demo", "--port", "0", "--engine", "scripted")
KEY = "sesame-open"
# What KServe's probes ask, without a key as those of Kubernetes.
PROBES = {
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/model/ready",
    "/v2/models/model/versions/model/ready",
}


@dataclass(frozen=True)
class Both:
    """A server with two listeners."""

    server: ServerProcess
    inference: str
    management: str


def start_both(start: StartServer, **environ: str) -> Both:
    """Start a server whose management routes have their own port."""
    settings = {"SERVING_MANAGEMENT_ADDRESS": "http://127.0.0.1:0"} | environ
    server = start(*ARGUMENTS, environ=settings)
    management = server.wait_for_line("Management on ", 20).split()[-1]
    inference = server.url_when_ready(20)
    return Both(server, inference, management)


def test_tls_answers_and_refuses_older_protocols(
    server_process: StartServer, tmp_path: Path
) -> None:
    """The certificate is the configured one; TLS 1.1 and plain text get nothing."""
    pair = make_pair(tmp_path)
    environ = {
        "SERVING_INFERENCE_ADDRESS": "https://127.0.0.1:0",
        "SERVING_CERTIFICATE_FILE": str(pair.certificate),
        "SERVING_PRIVATE_KEY_FILE": str(pair.key),
    }
    server = server_process("--demo", "--engine", "scripted", environ=environ)
    url = server.url_when_ready(20)
    assert url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(pair.certificate))
    request = urllib.request.Request(
        f"{url}/invocations", b'{"inputs": "hi"}', {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, context=context, timeout=20) as answer:
        assert "generated_text" in json.load(answer)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/ping", context=old, timeout=20)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        call(url.replace("https", "http"), "/ping", seconds=20)


KEY_FORMS = {
    "RSA, PKCS#8": (("rsa:2048",), False, "BEGIN PRIVATE KEY"),
    "RSA, PKCS#1": (("rsa:2048",), True, "BEGIN RSA PRIVATE KEY"),
    "curve, PKCS#8": (CURVE, False, "BEGIN PRIVATE KEY"),
    "curve, SEC 1": (CURVE, True, "BEGIN EC PRIVATE KEY"),
}


@pytest.mark.parametrize(("kind", "is_old", "head"), KEY_FORMS.values(), ids=KEY_FORMS)
def test_every_form_of_a_key_that_lmi_reads_serves_tls(
    server_process: StartServer, tmp_path: Path, kind: tuple[str, ...], is_old: bool, head: str
) -> None:
    """From config.properties, by LMI's names, relative to its home."""
    home = tmp_path / "home"
    (home / "certs").mkdir(parents=True)
    pair = make_pair(home / "certs", kind=kind)
    if is_old:
        as_traditional(pair.key)
    assert head in pair.key.read_text()
    config = tmp_path / "config.properties"
    config.write_text(
        "inference_address=https://127.0.0.1:0\n"
        "private_key_file=certs/server.key\ncertificate_file=certs/server.crt\n"
    )
    server = server_process(
        "--demo", "--engine", "scripted", "-f", str(config),
        environ={"MODEL_SERVER_HOME": str(home)},
    )  # fmt: skip
    url = server.url_when_ready(20)
    context = ssl.create_default_context(cafile=str(pair.certificate))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with urllib.request.urlopen(f"{url}/", context=context, timeout=20) as answer:
        page = answer.read().decode()
    assert answer.headers.get_content_type() == "text/html"
    assert 'href="./console"' in page


def test_lmis_series_are_there_where_lmi_has_them(server_process: StartServer) -> None:
    """With its switch: by its names and labels, picked by `name[]`; without it they are not."""
    lines = {}
    for switch in ("true", "false"):
        server = server_process(*ARGUMENTS, environ={"SERVING_PROMETHEUS": switch})
        url = server.url_when_ready(20)
        assert call(url, "/invocations", {"inputs": "x"}).status == 200
        path = "/server/metrics?name[]=Response_2XX_total&name[]=LoadModel"
        text = call(url, path).body.decode()
        lines[switch] = [line for line in text.splitlines() if not line.startswith("#")]
    host = socket.gethostname()
    assert f'Response_2XX_total{{Host="{host}"}} 1.0' in lines["true"]
    assert any(line.startswith('LoadModel{Model="model"}') for line in lines["true"])
    assert lines["false"] == []


def test_tls_fault_ends_the_start(server_process: StartServer, tmp_path: Path) -> None:
    """A key of another certificate is exit 1 with both files named, before the port opens."""
    pair, other = make_pair(tmp_path), make_pair(tmp_path, "other")
    environ = {
        "SERVING_INFERENCE_ADDRESS": "https://127.0.0.1:0",
        "SERVING_CERTIFICATE_FILE": str(pair.certificate),
        "SERVING_PRIVATE_KEY_FILE": str(other.key),
    }
    server = server_process("--demo", "--engine", "scripted", environ=environ)
    assert server.wait_exit() == 1
    last = server.stderr.strip().splitlines()[-1]
    assert last.startswith(f"lmi-vllm: error: private_key_file {other.key} does not belong to")


def test_management_address_has_only_management(server_process: StartServer) -> None:
    """Each listener answers its own routes and knows nothing of the other's."""
    both = start_both(server_process)
    for path in ("/models", "/metrics", "/server/metrics"):
        assert call(both.management, path).status == 200
        assert call(both.inference, path).status == 404
    assert call(both.inference, "/ping").status == 200
    assert call(both.inference, "/invocations", {"inputs": "x"}).status == 200
    assert call(both.management, "/invocations", {"inputs": "x"}).status == 404
    assert call(both.management, "/v1/completions", {"prompt": "x"}).status == 404


def test_management_address_taken(server_process: StartServer) -> None:
    """A second port that is taken ends the start, and the first one with it."""
    both = start_both(server_process)
    server = server_process(*ARGUMENTS, environ={"SERVING_MANAGEMENT_ADDRESS": both.management})
    assert server.wait_exit() == 1
    assert f"cannot listen on {both.management}: " in server.stderr


def routes_of(routes: Routes) -> list[tuple[str, str]]:
    """Return method and path of everything a listener answers."""
    app = create_app(InferenceService(RequestQueue(Lifecycle())), WebOptions(routes=routes))
    found = set()
    for route in app.router.routes():
        assert route.resource is not None
        path = re.sub(r"{\w+}", "model", route.resource.canonical)
        found.add(("POST" if route.method == "*" else route.method, path))
    return sorted(found)


def test_api_keys_guard_every_route_on_both_listeners(server_process: StartServer) -> None:
    """Without a key, and with a wrong one, only the health routes answer; with it, all do."""
    both = start_both(server_process, LMI_API_KEY=KEY, LMI_OPEN_SIGNALS="off")
    for url, routes in ((both.inference, Routes.INFERENCE), (both.management, Routes.MANAGEMENT)):
        for method, path in routes_of(routes):
            is_open = path in OPEN_PATHS or path in PROBES
            for headers in ({}, {"x-api-key": KEY[:-1]}, {"Authorization": "Bearer "}):
                answer = call(url, path, method=method, headers=headers)
                assert (answer.status == 401) is not is_open, (method, path)
            answer = call(url, path, method=method, headers={"Authorization": f"Bearer {KEY}"})
            assert answer.status != 401, (method, path)
    assert call(both.inference, "/nothing").status == 401
    assert KEY not in both.server.stderr + "".join(both.server.seen)


def test_keys_of_a_file_can_be_replaced(server_process: StartServer, tmp_path: Path) -> None:
    """A key that leaves the file is refused on both listeners, without a restart."""
    file = tmp_path / "keys"
    file.write_text("first\n")
    both = start_both(server_process, LMI_API_KEY_FILE=str(file), LMI_OPEN_SIGNALS="off")
    for url in (both.inference, both.management):
        assert call(url, "/v1/models", headers={"x-api-key": "first"}).status != 401
    file.write_text("second\n")
    now = {"x-api-key": "second"}
    for url in (both.inference, both.management):
        assert wait_until(lambda u=url: call(u, "/v1/models", headers=now).status != 401, 5)  # type: ignore[misc]
        assert call(url, "/v1/models", headers={"x-api-key": "first"}).status == 401


def test_routers_need_no_key_on_the_management_address(server_process: StartServer) -> None:
    """For what they read; on the inference address only where LMI_OPEN_SIGNALS=on."""
    signals = ("/metrics", "/server/metrics", "/v1/models")
    both = start_both(server_process, LMI_API_KEY=KEY)
    assert [call(both.management, path).status for path in signals] == [200] * 3
    assert call(both.inference, "/v1/models").status == 401
    for method, path in (("GET", "/adapters"), ("POST", "/v1/load_lora_adapter")):
        assert call(both.management, path, method=method).status == 401
    both = start_both(server_process, LMI_API_KEY=KEY, LMI_OPEN_SIGNALS="on")
    assert call(both.inference, "/v1/models").status == 200
    assert call(both.inference, "/v1/completions", {"prompt": "x"}).status == 401


def test_unix_socket_answers(server_process: StartServer, tmp_path: Path) -> None:
    """`unix:` is a listener too."""
    path = tmp_path / "s"
    server = server_process(
        "--demo", "--engine", "scripted", environ={"SERVING_INFERENCE_ADDRESS": f"unix:{path}"}
    )
    assert server.wait_listening() == f"unix:{path}"
    assert path.is_socket()
