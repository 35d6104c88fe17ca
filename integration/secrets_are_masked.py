"""Sentinels in every secret-ish setting, and in a prompt, appear in nothing the server writes."""

import os
import subprocess
import sys
from pathlib import Path

from integration.client import call
from integration.conftest import StartServer, clean_environment

KEY = "SENTINEL-api-key"
SECRETS = {
    "LMI_API_KEY": KEY,
    "HF_TOKEN": "SENTINEL-hf-token",
    "HUGGING_FACE_HUB_TOKEN": "SENTINEL-old-hub-token",
    "AWS_SECRET_ACCESS_KEY": "SENTINEL-aws-secret",
    "AWS_SESSION_TOKEN": "SENTINEL-aws-session",
    "SERVING_KEYSTORE_PASS": "SENTINEL-keystore",
    "OPTION_ENV": "DB_PASSWORD=SENTINEL-in-env,PLAIN=1",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:SENTINEL-otlp@127.0.0.1:9",
    "OTEL_EXPORTER_OTLP_HEADERS": "x-key=SENTINEL-otlp-header",
    "HF_ENDPOINT": "https://user:SENTINEL-login@hub.example.com",
}
PROMPT = "SENTINEL-prompt"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CALLS = (
    ("/ping", None, {}),
    ("/ping?api_key=SENTINEL-query&other=SENTINEL-query", None, {}),
    (
        "/adapters?name=a&src=https://u:SENTINEL-src@h/?X-Amz-Signature=SENTINEL-src",
        b"",
        AUTHORIZED,
    ),
    ("/metrics", None, AUTHORIZED),
    ("/models", None, AUTHORIZED),
    ("/openapi.json", None, AUTHORIZED),
    ("/nothing", None, AUTHORIZED),
    ("/models", None, {"x-api-key": KEY[:-1]}),
    ("/adapters?name=a&src=/nowhere", b"", AUTHORIZED),
)


def test_no_secret_and_no_prompt_is_written(server_process: StartServer) -> None:
    """Not to stdout, stderr or any answer; and a prompt not above debug, also when it is bad."""
    server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=SECRETS)
    url = server.url_when_ready(20)
    said = b"".join(call(url, path, body, headers=headers).body for path, body, headers in CALLS)
    for payload in ({"inputs": PROMPT}, {"inputs": [PROMPT, 1]}, {"prompt": PROMPT, "n": "x"}):
        call(url, "/invocations", payload, headers=AUTHORIZED)
    call(url, "/invocations", f'{{"inputs": "{PROMPT}'.encode(), headers=AUTHORIZED)
    server.process.terminate()
    assert server.wait_exit() == 0
    printed = server.stderr + "".join(server.seen) + said.decode()
    assert "SENTINEL" not in printed, [line for line in printed.splitlines() if "SENTINEL" in line]


def test_explain_and_failing_starts_show_no_secret(tmp_path: Path) -> None:
    """`explain`, as text and as JSON, and the error of a start that fails."""
    environ = clean_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)} | SECRETS
    bad = {"OPTION_DTYPE": "none such", "OPTION_HF_OVERRIDES": '{"api_key": "SENTINEL-json"'}
    for words in (["explain", "--demo"], ["explain", "--demo", "--json"], ["serve", "--demo"]):
        for more in ({}, bad) if words[0] == "explain" else (bad,):
            done = subprocess.run(
                [sys.executable, "-m", "lmi_vllm", *words],
                env=environ | more,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=180,  # a start, where other tests have the cores
                check=False,
            )
            printed = done.stdout + done.stderr
            assert printed
            assert "SENTINEL" not in printed, words
