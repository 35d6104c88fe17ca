"""schemathesis over our own API description: no 5xx, nothing that the description does not say.

The bulk runs over the scripted engine, where a request costs no model; a slice of every route but
those that change adapters runs over the real one.
"""

import re
import subprocess
import sys

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from integration.client import call
from integration.conftest import RunningServer, StartServer

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
CHECKS += ",response_schema_conformance"
BULK = 5000
# Its specified answer to a second model is 507, which the first check takes for a fault.
SECOND_MODEL = "^/models$"
_GENERATED = re.compile(r"^\s*(\d+) generated", re.MULTILINE)

pytest.importorskip("schemathesis", reason="needs schemathesis: make setup installs it")


def _fuzz(url: str, *more: str) -> int:
    """Return how many requests were made; fails on the first finding."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--checks", CHECKS, "--request-timeout", "120", "--no-color", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-6000:]
    found = _GENERATED.search(report)
    assert found, report[-3000:]
    return int(found[1])


def test_bulk_over_the_scripted_engine(server_process: StartServer) -> None:
    """At least five thousand requests, and the server still answers."""
    server = server_process("--demo", "--port", "0", "--engine", "scripted")
    url = server.url_when_ready(20)
    count = 0
    while count < BULK:  # a slow machine makes fewer in a round
        phases = "examples,coverage,fuzzing"
        count += _fuzz(url, "--max-time", "60", "--seed", str(count + 1), "--phases", phases,
                       "--exclude-path-regex", SECOND_MODEL)  # fmt: skip
    assert call(url, "/ping").status == 200
    assert "Traceback" not in server.stderr
    print(f"{count} requests over the scripted engine")


@pytest.mark.vllm
def test_description_of_the_real_engine_is_valid(demo_server: RunningServer) -> None:
    """With vLLM's schemas in it the document is valid still, and its examples are answered."""
    document = call(demo_server.url, "/openapi.json").json()
    OpenAPIV31SpecValidator(document).validate()
    assert "ChatCompletionRequest" in document["components"]["schemas"]
    for path in ("/v1/messages", "/v1/responses", "/tokenize", "/detokenize"):
        assert document["paths"][path]["post"]["tags"] == ["vLLM"], path
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert "$ref" in body["schema"] or "anyOf" in body["schema"]
        assert call(demo_server.url, path, body["example"]).status == 200, path


@pytest.mark.vllm
def test_slice_over_the_real_engine(demo_server: RunningServer) -> None:
    """The same over vLLM, whose own models then describe its bodies."""
    changing = ["--exclude-path-regex", f"adapters|lora_adapter|server/logging|{SECOND_MODEL}"]
    # What vLLM describes by itself has faults of its own: /v1/systemone answers a null with 500.
    changing += ["--exclude-tag", "vLLM"]
    # Its boundary phase makes fifteen thousand requests of vLLM's schemas: not for every run.
    phases = ["--phases", "examples,fuzzing", "-n", "40"]
    count = _fuzz(demo_server.url, *phases, *changing, "--seed", "1")
    assert count > 100
    assert call(demo_server.url, "/ping").status == 200
    assert call(demo_server.url, "/invocations", {"inputs": "The moon is"}).status == 200
    print(f"{count} requests over the real engine")
