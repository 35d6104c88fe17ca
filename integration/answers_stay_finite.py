"""What is not finite ends with its request, and a model that is not finite is replaced.

The check of weights at registration is taken out of these servers: the adapter stands for one that
slips under its bounds, or was registered before there was a check.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.client import call, wait_until
from integration.conftest import StartServer
from integration.engine_restart import RESTART_SECONDS, answers, ping
from tests.support.adapter_files import make_adapter

pytestmark = pytest.mark.vllm
UNCHECKED = """
import runpy, sys
import lmi_vllm.adapters.check as registration
import lmi_vllm.engine.vllm.adapter_files as copies
registration.check_values = copies.check_values = lambda *_: None
sys.argv[1:3] = []
runpy.run_module("lmi_vllm", run_name="__main__")
"""
SPOILT_LATER = """
import pathlib, runpy, sys
import lmi_vllm.engine.vllm.cpu.worker as worker
mark = pathlib.Path(__file__).with_name("make-nan")
execute = worker.GuardedCpuWorker.execute_model
def corrupted(self, *arguments, **named):
    if mark.exists():
        mark.unlink()
        for weights in self.model_runner.model.parameters():
            weights.data.fill_(float("nan"))
    return execute(self, *arguments, **named)
worker.GuardedCpuWorker.execute_model = corrupted
sys.argv[1:3] = []
runpy.run_module("lmi_vllm", run_name="__main__")
"""
STORY = (
    "Once upon a time there was a river, and a city on the river. " * 5
)  # longer than the others
LONG = {"max_new_tokens": 100, "ignore_eos_token": True}


def launcher(folder: Path, text: str) -> tuple[str, str]:
    """Return the command of a server that is changed by `text`."""
    script = folder / "changed_server.py"
    script.write_text(text, encoding="utf-8")
    return sys.executable, str(script)


def metric(url: str, line: str) -> float:
    """Return a value of the metrics; 0 while there is none."""
    rows = call(url, "/metrics").body.decode().splitlines()
    return next((float(row.split()[-1]) for row in rows if row.startswith(line)), 0.0)


def test_poisoned_adapter_does_not_change_sixty_other_answers(
    server_process: StartServer, tmp_path: Path
) -> None:
    """One request of 100 tokens to it, in three dialects; then the base and the others answer."""
    changed = launcher(tmp_path, UNCHECKED)
    server = server_process("--demo", "--port", "0", launcher=changed, is_forked=True)
    url = server.url_when_ready()
    names = (None, "capitals", "json")
    expected = answers(url, names)
    source = make_adapter(tmp_path / "poison", 1, float("nan"))
    assert call(url, "/adapters", {"name": "poison", "src": str(source)}).status == 200
    body: dict[str, Any] = {"inputs": STORY, "parameters": LONG, "adapters": "poison"}
    refused = call(url, "/invocations", body)
    assert refused.status == 500
    assert "not finite" in refused.json()["error"]
    assert call(url, "/invocations", {**body, "stream": True}).status == 500
    chat = {"model": "poison", "messages": [{"role": "user", "content": "Hello"}]}
    assert call(url, "/v1/chat/completions", chat).status == 500
    assert call(url, "/adapters/poison", method="DELETE").status == 200
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: answers(url, names), range(20)))
    assert found == [expected] * 20
    assert ping(url)[0] == 200
    assert metric(url, 'lmi_not_finite_requests_total{of="adapter"}') == 3
    assert metric(url, 'lmi_not_finite_requests_total{of="model"}') == 0


def test_model_that_is_not_finite_any_more_is_replaced(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Its request fails, health is bad, and the next engine answers as the first one did."""
    server = server_process(
        *("--demo", "--port", "0"),
        launcher=launcher(tmp_path, SPOILT_LATER),
        environ={"SERVING_RETRY_THRESHOLD": "1"},
        is_forked=True,
    )
    url = server.url_when_ready()
    expected = answers(url, (None, "json"))
    (tmp_path / "make-nan").touch()
    assert call(url, "/invocations", {"inputs": "Once upon a time"}).status == 500
    assert wait_until(lambda: ping(url)[0] == 503, 10), server.describe()
    assert wait_until(lambda: ping(url)[0] == 200, RESTART_SECONDS), server.describe()
    assert answers(url, (None, "json")) == expected
    assert "not finite any more" in server.stderr
