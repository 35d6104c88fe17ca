"""Prometheus and promtool, the real ones, with our configuration, rules and dashboard.

Proves that Prometheus reads our metrics without an error. Every expression of the dashboard and of
the alert rules uses series of this server, and Prometheus evaluates it.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer
from lmi_vllm.features.metrics import ALL as OF_FEATURES
from lmi_vllm.telemetry.metrics import ALL
from tests.support.monitoring import (
    PROMETHEUS,
    Exposition,
    alert_expressions,
    dashboard_expressions,
    wrong_uses,
)

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)
# What happens rarely has no samples on a server that is well.
SILENT = (
    "lmi_stream_errors",
    "lmi_client_disconnects",
    "lmi_drained_requests",
    "lmi_adapter_store_lookups",
)


def work(url: str) -> None:
    """Let something be counted, on both lanes and with an adapter."""
    for _ in range(3):
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 5}}
        assert call(url, "/invocations", body).status == 200
        assert call(url, "/invocations", {**body, "adapters": "capitals"}).status == 200
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        assert call(url, "/v1/chat/completions", chat).status == 200


def promtool(*arguments: object, text: str = "") -> None:
    """Run promtool; its complaint is the failure."""
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("source", ["dashboard", "alerts"])
def test_every_name_is_one_that_the_server_exports(demo_server: RunningServer, source: str) -> None:
    """Names and labels of the dashboard and the rules, against /metrics of the real engine."""
    work(demo_server.url)
    exported = Exposition.read(call(demo_server.url, "/metrics").body.decode())
    for metric in (*ALL, *OF_FEATURES):  # labels of what has not happened yet
        (family,) = metric.describe()
        if family.name in SILENT:
            exported.labels[f"{family.name}_total"] |= set(metric._labelnames)
    found = dashboard_expressions() if source == "dashboard" else alert_expressions()
    assert [wrong for text in found for wrong in wrong_uses(text, exported)] == []


@needs_promtool
@pytest.mark.vllm
def test_promtool_reads_the_exported_metrics(demo_server: RunningServer) -> None:
    """`promtool check metrics`: of ours it has nothing to say; its advice for vLLM's is vLLM's."""
    work(demo_server.url)
    text = call(demo_server.url, "/metrics").body.decode()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode in (0, 3), said  # 3: advice on names; 1: it cannot be read
    assert [line for line in said.splitlines() if line.startswith("lmi_")] == []
    kept = {"lmi", "process", "python"}
    ours = [
        line
        for line in text.splitlines(keepends=True)
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").split("_")[0] in kept
    ]
    promtool("check", "metrics", text="".join(ours))


@pytest.fixture
def prometheus(demo_server: RunningServer, tmp_path: Path) -> Iterator[str]:
    """Run Prometheus with our configuration, its target replaced by the server of the tests."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Prometheus: apt-get install prometheus")
    text = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8080", urlsplit(demo_server.url).netloc)
    (tmp_path / "prometheus.yml").write_text(text.replace("15s", "1s"), encoding="utf-8")
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        program,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """Return what Prometheus computes now."""
    answer = call(url, f"/api/v1/query?query={quote(expression)}")
    document = json.loads(answer.body)
    assert document["status"] == "success", (expression, document)
    result: list[dict[str, Any]] = document["data"]["result"]
    return result


@pytest.mark.vllm
def test_prometheus_scrapes_the_server_and_evaluates_every_rule(
    demo_server: RunningServer, prometheus: str
) -> None:
    """It finds the target up, reads the rules, and has a value for what a busy server shows."""

    def is_up() -> bool:
        try:
            found = query(prometheus, "up")
        except (OSError, ValueError):
            return False  # Prometheus itself is starting
        return bool(found) and found[0]["value"][1] == "1"

    assert wait_until(is_up, 60)
    work(demo_server.url)
    median = "sum(rate(lmi_time_to_first_token_seconds_count[1m]))"
    assert wait_until(
        lambda: any(float(one["value"][1]) > 0 for one in query(prometheus, median)), 60
    )
    for expression in alert_expressions():
        query(prometheus, expression)
    rare = (*SILENT, "increase(")
    for expression in dashboard_expressions():
        found = query(prometheus, expression)
        assert found or any(name in expression for name in rare), expression
    rules = json.loads(call(prometheus, "/api/v1/rules").body)["data"]["groups"]
    assert sum(len(group["rules"]) for group in rules) == 20
    assert [
        rule["lastError"] for group in rules for rule in group["rules"] if "lastError" in rule
    ] == []
    alerts = json.loads(call(prometheus, "/api/v1/alerts").body)["data"]["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts] == []
