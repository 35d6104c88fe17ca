"""The model's code for SageMaker's library is put into vLLM's application, over no engine."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.features.custom_code.loading import load_model_code
from lmi_vllm.features.custom_code.sagemaker_library import hand_over
from lmi_vllm.messages import HttpCall, OpenAIReply, RouteKind
from tests.contract.conftest import LoopThread
from tests.support.hook_files import SAGEMAKER_CODE
from tests.support.vllm_routes import script

pytestmark = pytest.mark.vllm


@pytest.fixture
def bridge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Any]:
    """The bridge to vLLM's application, changed by that code."""
    pytest.importorskip("vllm")
    from model_hosting_container_standards import sagemaker  # noqa: PLC0415
    from model_hosting_container_standards.common.fastapi.middleware import (  # noqa: PLC0415
        middleware_registry,
    )
    from model_hosting_container_standards.common.fastapi.middleware.source.decorator_loader import (  # noqa: E501, PLC0415
        decorator_loader,
    )
    from model_hosting_container_standards.common.handler.registry import (  # noqa: PLC0415
        handler_registry,
    )

    from lmi_vllm.engine.vllm.bridge import Bridge  # noqa: PLC0415 (imports vLLM)

    with caplog.at_level("WARNING"):  # which the library sets for the whole process
        made = Bridge(script("record_vllm_routes").application(), None)  # type: ignore[arg-type]
    path = tmp_path / "model.py"
    path.write_text(SAGEMAKER_CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    environ = {"CUSTOM_POST_PROCESS": "model:after"}
    monkeypatch.setenv(*next(iter(environ.items())))
    sys.modules.pop("model", None)
    load_model_code(path, "handle", None)
    hand_over(
        SimpleNamespace(http=made),  # type: ignore[arg-type]
        path=path,
        folder=tmp_path,
        environ=environ,
    )
    yield made
    sys.modules.pop("model", None)
    handler_registry.clear()
    decorator_loader.clear()
    middleware_registry.clear_middlewares()
    sagemaker.SageMakerFunctionLoader._default_function_loader = None


def ask(run: LoopThread, bridge: Any, method: str, path: str, body: object = None) -> OpenAIReply:
    """Return the application's answer."""
    headers = [(b"content-type", b"application/json")]
    call = HttpCall(method, path, "", headers, json.dumps(body).encode(), "an-id")
    answer: OpenAIReply = run(bridge.call(call))
    return answer


def test_code_for_the_library_answers(run: LoopThread, bridge: Any) -> None:
    """Handlers by decorator and by name, and what is around every route; adapters stay refused."""
    assert bridge.sees_every_request
    assert bridge.find("GET", "/ping").kind is RouteKind.INFORMATION
    assert bridge.find("POST", "/invocations").kind is RouteKind.INFERENCE
    assert bridge.find("POST", "/adapters") is None
    ping = ask(run, bridge, "GET", "/ping")
    asked = ask(run, bridge, "POST", "/invocations", {"a": 1})
    version = ask(run, bridge, "GET", "/version")
    assert json.loads(ping.body) == {"status": "mine"}
    assert json.loads(asked.body) == {"asked": {"a": 1}}
    for answer in (ping, asked, version):
        marks = answer.headers["x-throttled"], answer.headers["x-after"]
        assert marks == ("no", "yes")
