"""The table of vLLM's routes is true of the release that is installed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine
from tests.support.vllm_routes import SCRIPTS, script

pytestmark = pytest.mark.vllm

DECORATOR = re.compile(r"@\w*router\.(?:get|post|put|delete|patch|websocket)\(\s*\"([^\"]+)\"")
PAGE, RECORDER = script("vllm_routes_page"), script("record_vllm_routes")


@pytest.fixture(scope="module")
def bridge() -> Any:
    """The bridge to an application with every task and every switch, over no engine."""
    pytest.importorskip("vllm")
    from vllm import envs  # noqa: PLC0415

    from lmi_vllm.engine.vllm.bridge import Bridge  # noqa: PLC0415 (imports vLLM)

    is_cached = envs._is_envs_cache_enabled()  # by an engine of an earlier test: no switch is seen
    envs.disable_envs_cache()
    try:
        return Bridge(RECORDER.application(), None)  # type: ignore[arg-type]
    finally:
        if is_cached:
            envs.enable_envs_cache()


def test_every_route_of_the_installed_release_has_an_entry(bridge: Any) -> None:
    """A release that adds one names it here."""
    assert sorted(RECORDER.routes(bridge.app).keys() - PAGE.answers().keys()) == []


def test_record_is_that_of_the_installed_release() -> None:
    """Paths, methods, switches and tasks."""
    pytest.importorskip("vllm")
    command = [sys.executable, SCRIPTS / "record_vllm_routes.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_route_is_behind_a_switch_that_the_recorder_does_not_know() -> None:
    """Every path that a decorator in vLLM's source names is in the table."""
    pytest.importorskip("vllm")
    import vllm.entrypoints  # noqa: PLC0415 (imports vLLM)

    (folder,) = map(Path, vllm.entrypoints.__path__)
    texts = [file.read_text(encoding="utf-8") for file in folder.rglob("*.py")]
    named = {path for text in texts for path in DECORATOR.findall(text)}
    assert len(named) > 50
    assert sorted(named - PAGE.answers().keys()) == []


def test_bridge_matches_the_route_table(bridge: Any) -> None:
    """It reads the application: no list of ours says what is handed on."""
    found = {route.path: str(route.kind) for route in bridge.routes}
    there = RECORDER.routes(bridge.app)
    said = {path: row["acts"] for path, row in PAGE.answers().items() if row["by"] == "bridge"}
    own = {path for path, row in PAGE.answers().items() if row["by"] == "ours"}
    assert {path: found[path] for path in found if path not in own} == {
        path: kind for path, kind in said.items() if path in there
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/adapters"),
        ("DELETE", "/adapters/mine"),
    ],
)
def test_no_route_bypasses_the_registry_of_adapters(bridge: Any, method: str, path: str) -> None:
    """Not even where vLLM's switch has them: a listener without ours would hand them on."""
    assert path.replace("mine", "{adapter_name}") in RECORDER.routes(bridge.app)
    assert bridge.find(method, path) is None


def test_loaded_application_has_no_unlisted_route(vllm_engine: Engine) -> None:
    """Over a real engine it is laid out as the recorder lays it out."""
    assert vllm_engine.http is not None
    assert {route.path for route in vllm_engine.http.routes} <= PAGE.answers().keys()
