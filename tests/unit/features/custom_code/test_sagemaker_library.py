"""Code for SageMaker's library in vLLM's application: when it is handed over, and when named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.features.custom_code.loading import load_model_code
from lmi_vllm.features.custom_code.sagemaker_library import hand_over
from lmi_vllm.server.code_start import warn_of_handlers

PING = {"CUSTOM_FASTAPI_PING_HANDLER": "model:ping"}


def engine_with(changes: list[Any] | None) -> Any:
    """Return an engine whose application keeps what is to change it; without one for None."""
    return SimpleNamespace(http=changes and SimpleNamespace(change=changes.append))


@pytest.mark.parametrize(
    ("code", "environ", "is_handed_over"),
    [
        ("def input_fn(request_body, content_type): return request_body", {}, False),
        ("async def custom_sagemaker_ping_handler(): pass", {}, True),
        ("async def custom_sagemaker_invocation_handler(request): pass", {}, True),
        ("def of(): pass\nof.__module__ = 'model_hosting_container_standards.x'", {}, True),
        ("x = 1", PING, True),
        ("x = 1", {"CUSTOM_POST_PROCESS": "model:after"}, True),
    ],
)
def test_code_for_the_library_is_handed_over(
    tmp_path: Path, code: str, environ: dict[str, str], is_handed_over: bool
) -> None:
    """LMI's own hooks are none of it."""
    path = tmp_path / "model.py"
    path.write_text(code, encoding="utf-8")
    load_model_code(path, "handle", None)
    changes = [None]
    hand_over(engine_with(changes), path=path, folder=tmp_path, environ=environ)
    assert len(changes) == 1 + is_handed_over


def test_variables_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Each, with the reason: it would be ignored without a message."""
    warn_of_handlers({**PING, "HOME": "/"}, "LMI_CUSTOM_CODE=none")
    hand_over(engine_with(None), path=None, folder=None, environ=PING)
    assert [record.getMessage() for record in caplog.records] == [
        "CUSTOM_FASTAPI_PING_HANDLER has no effect: LMI_CUSTOM_CODE=none",
        "CUSTOM_FASTAPI_PING_HANDLER has no effect: the engine has no HTTP application of vLLM's",
    ]
