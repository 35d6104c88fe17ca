"""A model.py with handlers and middleware for SageMaker's library, as `vllm serve` runs it.

Both servers have the same file in the model's folder, and answer alike: a handler of `/ping`, what
is around every request, and vLLM's own dispatch on `/invocations` behind it.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from integration.client import call
from integration.compared_requests import CHAT, MODEL, TEXT, UNKNOWN, Request, post
from integration.comparison import compare, vllm_server
from integration.conftest import running_server
from integration.plain_model import plain_model

pytestmark = pytest.mark.vllm
SCRIPT: Final = """
import model_hosting_container_standards.sagemaker as sagemaker
from fastapi import Request
from fastapi.responses import JSONResponse
from model_hosting_container_standards.common.fastapi.middleware import custom_middleware

imported = globals().get("imported", 0) + 1


@sagemaker.custom_ping_handler
async def ping():
    return JSONResponse({"status": "mine", "imported": imported}, headers={"x-ping": "mine"})


@custom_middleware("throttle")
async def throttle(request, call_next):
    if request.headers.get("x-too-much"):
        return JSONResponse({"error": "slowly"}, status_code=429)
    response = await call_next(request)
    response.headers["x-throttled"] = "no"
    return response


async def after(response):
    response.headers["x-after"] = "yes"
    return response
"""
INVOKE: Final = """
from fastapi import Request
from fastapi.responses import JSONResponse


async def custom_sagemaker_invocation_handler(raw_request: Request):
    return JSONResponse({"asked": await raw_request.json()})
"""
# The model.py -> the variables beside it.
SCRIPTS: Final = {
    "decorators": (SCRIPT, {"CUSTOM_POST_PROCESS": "model:after"}),
    "functions": (INVOKE, {}),
}


@pytest.fixture(scope="module", params=SCRIPTS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Our server and vLLM's over a model with that file."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    text, environ = SCRIPTS[request.param]
    folder = tmp_path_factory.mktemp("scripted")
    model = plain_model(folder / "model", served_model_name=MODEL)
    (model / "model.py").write_text(text, encoding="utf-8")

    def command(port: int) -> list[str]:
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port),
            "--host", "127.0.0.1", "--model", str(model), "--served-model-name", MODEL,
            "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "67108864",
        ]  # fmt: skip

    theirs = {"SAGEMAKER_MODEL_PATH": str(model), **environ}
    with (
        running_server(folder, "-s", str(model), environ=dict(environ)) as ours,
        vllm_server(command, theirs) as vllm_url,
    ):
        yield ours.url, vllm_url


REQUESTS: Final = tuple(
    replace(request, name=f"scripted {request.name}")  # not that of a row of the differences
    for request in (
        Request("ping", "GET", "/ping"),
        post("chat", "/invocations", CHAT),
        post("prompt", "/invocations", TEXT),
        post("chat stream", "/invocations", {**CHAT, "stream": True}),
        post("unknown model", "/invocations", {**CHAT, "model": UNKNOWN}),
        post("nothing known", "/invocations", {"model": MODEL}),
        post("LMI's shape", "/invocations", {"inputs": "Once upon a time"}),
        post("cut", "/invocations", b"{"),
        post("as text", "/invocations", b"hello", "text/plain"),
        post("too much", "/invocations", CHAT, x_too_much="1"),
        post("too much", "/v1/messages", CHAT, x_too_much="1"),
        post("whole", "/v1/completions", TEXT),
        post("stream", "/v1/chat/completions", {**CHAT, "stream": True}),
        post("whole", "/tokenize", {"prompt": "Once", "model": MODEL}),
    )
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.name)
def test_code_for_sagemaker_s_library_answers_alike(
    both: tuple[str, str], request_: Request
) -> None:
    """Whatever its file says is around or instead of vLLM's handlers."""
    compare(request_, *both)


def test_code_that_may_not_run_is_not_run(tmp_path: Path) -> None:
    """LMI_CUSTOM_CODE=none: LMI's own shapes on `/invocations`, and the log names what is left."""
    model = plain_model(tmp_path / "model")
    (model / "model.py").write_text(SCRIPT + INVOKE, encoding="utf-8")
    environ = {"LMI_CUSTOM_CODE": "none", "CUSTOM_POST_PROCESS": "model:after"}
    environ["SAGEMAKER_MODEL_PATH"] = str(model)
    with running_server(tmp_path, "-s", str(model), environ=environ) as server:
        answer = call(server.url, "/invocations", {"inputs": "Once upon a time"})
        assert (answer.status, "generated_text" in answer.json()) == (200, True)
        assert "x-throttled" not in answer.headers
        assert call(server.url, "/ping").json() == {"model": {"status": "Healthy"}}
        assert "CUSTOM_POST_PROCESS has no effect: LMI_CUSTOM_CODE=none" in server.process.stderr
