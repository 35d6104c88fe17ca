"""Further front ends are forked by a template that has imported vLLM: as if they were spawned."""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from integration.client import wait_until
from integration.conftest import RunningServer, StartServer, start_server
from integration.front_ends_share_one_engine import SHORT, ask, front_ends, is_listening
from integration.processes_of_a_server import FRONT_END, TEMPLATE, template_of
from lmi_vllm.features.front_ends.process import REPORT_SECONDS
from tests.support.certificates import make_pair

pytest.importorskip("opentelemetry.proto", reason="comes with vLLM")

from integration.traces_reach_a_collector import QUICK, traceparent
from tests.support.otlp_collector import Collector, http_collector

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.random_order(disabled=True),  # the last one ends the shared server
]
STANDARD = {"0", "1", "2"}
SPAWNED = {"LMI_FRONTEND_PROCESSES": "2", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Where spans are sent."""
    with http_collector() as made:
        yield made


@pytest.fixture(scope="module")
def forked(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[RunningServer]:
    """A server of two front ends with TLS and traces."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    folder = tmp_path_factory.mktemp("forked")
    pair = make_pair(folder)
    environ = QUICK | {
        "LMI_FRONTEND_PROCESSES": "2",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "SERVING_INFERENCE_ADDRESS": "https://127.0.0.1:0",
        "SERVING_CERTIFICATE_FILE": str(pair.certificate),
        "SERVING_PRIVATE_KEY_FILE": str(pair.key),
    }
    server = start_server(folder, "--demo", environ=environ)
    try:
        yield RunningServer(server, server.url_when_ready())
    finally:
        server.kill()


def files_of(pid: int) -> dict[str, str]:
    """Return what the descriptors of a process are, but for its standard streams."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if entry.name not in STANDARD and os.path.lexists(entry):
            found[entry.name] = str(entry.readlink())
    return found


def kinds_of(pid: int) -> Counter[str]:
    """Return how many descriptors of each kind a process has; the null device is none."""
    files = files_of(pid).values()
    names = (re.sub(r"\d+|/tmp/.*", "", link) for link in files if link != os.devnull)
    return Counter(names)


def test_processes_have_names_and_one_parent(forked: RunningServer) -> None:
    """`ps` shows which is which, and each of them was forked."""
    first, other = front_ends(forked.process)
    template = template_of(first)
    assert template is not None
    assert template.ppid() == first
    assert psutil.Process(other).ppid() == first  # it does not end with the template
    assert psutil.Process(other).cmdline()[0].strip() == FRONT_END
    assert template.cmdline()[0].strip() == TEMPLATE
    assert "are spawned" not in forked.process.stderr
    assert forked.process.stderr.count("importing vLLM") == 1


def metric_files(pid: int) -> set[str]:
    """Return the files that all front ends map: their counters."""
    return {link for link in files_of(pid).values() if link.endswith("/counters")}


def test_all_else_is_as_of_a_spawned_one(forked: RunningServer, collector: Collector) -> None:
    """TLS, spans below the caller's, metrics, the level of the log, and what is asked of health."""
    _, other = front_ends(forked.process)
    trace_id, headers = traceparent(0x31)
    answer = ask(forked.url, other, "/invocations", SHORT, headers=headers)
    assert answer.status == 200
    assert wait_until(lambda: len(collector.of(trace_id)) == 2, 20)
    assert ask(forked.url, other, "/ping").status == 200
    text = ask(forked.url, other, "/metrics").body.decode()
    assert 'lmi_state{state="Healthy"} 1.0' in text
    assert f'pid="{other}"' not in text
    assert ask(forked.url, other, "/server/logging?level=debug", method="POST").status == 200
    ask(forked.url, other, "/invocations", SHORT)

    def is_told() -> bool:
        lines = forked.process.log
        return any(line["pid"] == other and line["level"] == "DEBUG" for line in lines)

    assert wait_until(is_told, 10)
    assert ask(forked.url, other, "/server/logging?level=info", method="POST").status == 200


def test_process_that_dies_is_replaced_by_a_forked_one(
    forked: RunningServer, collector: Collector
) -> None:
    """By the same template, while the server has threads and connections; spans go on.

    No other signal ends it, and no request that was answered is one that it leaves behind.
    """
    first, other = front_ends(forked.process)
    template = template_of(first)
    assert template is not None
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.kill(other, number)
    for _ in range(20):  # some are over before the process reports
        assert ask(forked.url, other, "/invocations", SHORT).status == 200
    time.sleep(4 * REPORT_SECONDS)
    os.kill(other, signal.SIGKILL)
    assert wait_until(lambda: {*front_ends(forked.process)} - {first, other} != set(), 20)
    (third,) = {*front_ends(forked.process)} - {first, other}
    assert psutil.Process(third).cmdline()[0].strip() == FRONT_END
    assert wait_until(lambda: is_listening(third), 60), forked.process.describe()
    assert f"front-end process {other} ended with signal 9" in forked.process.stderr
    assert "requests of a process that ended" not in forked.process.stderr
    trace_id, headers = traceparent(0x32)
    assert ask(forked.url, third, "/invocations", SHORT, headers=headers).status == 200
    assert wait_until(lambda: len(collector.of(trace_id)) == 2, 20)
    adapted = ask(forked.url, third, "/invocations", {**SHORT, "adapters": "json"})
    assert adapted.status == 200


def test_death_of_the_template_is_survived(forked: RunningServer) -> None:
    """Its front ends go on; the next one is spawned, and the first process answers meanwhile."""
    first, other = front_ends(forked.process)
    template = template_of(first)
    assert template is not None
    template.kill()
    ended = "template of front-end processes has ended"
    assert wait_until(lambda: ended in forked.process.stderr, 20)
    assert ask(forked.url, other, "/invocations", SHORT).status == 200
    killed = psutil.Process(other)
    killed.kill()
    killed.wait(10)  # until the kernel has closed its socket, it resets those it gives to it
    assert ask(forked.url, first, "/ping").status == 200
    assert wait_until(lambda: {*front_ends(forked.process)} - {first, other} != set(), 20)
    (third,) = {*front_ends(forked.process)} - {first, other}
    assert wait_until(lambda: is_listening(third), 90), forked.process.describe()
    assert psutil.Process(third).cmdline()[0].strip() != FRONT_END
    assert ask(forked.url, third, "/invocations", SHORT).status == 200


def test_forked_process_has_no_descriptor_of_the_first(server_process: StartServer) -> None:
    """Nor of the template; it has what a spawned one has. A server that is killed leaves nothing.

    Then the kernel ends engine, template and front ends.
    """
    environ = {"LMI_FRONTEND_PROCESSES": "2"}
    server = server_process("--demo", "--port", "0", environ=environ)
    url = server.url_when_ready()
    first, other = front_ends(server)
    template = template_of(first)
    assert template is not None
    theirs = {*files_of(first).values(), *files_of(template.pid).values()} - {os.devnull}
    shared = {link for link in files_of(other).values() if link in theirs}
    assert {link for link in shared if not link.startswith("anon_inode:")} <= metric_files(first)
    spawned = server_process("--demo", "--port", "0", environ=SPAWNED)
    its_url = spawned.url_when_ready()
    reason = "are spawned and import vLLM again: VLLM_WORKER_MULTIPROC_METHOD=spawn"
    assert reason in spawned.stderr
    assert template_of(spawned.process.pid) is None
    its_first, one = front_ends(spawned)
    assert psutil.Process(one).ppid() == its_first
    for base, pid in ((url, other), (its_url, one)):
        assert ask(base, pid, "/invocations", SHORT).status == 200

    def more() -> Counter[str]:
        return kinds_of(other) - kinds_of(one)

    assert wait_until(lambda: not more(), 20), more()
    below = server.children()
    assert len(below) >= 3
    server.process.kill()
    server.wait_exit()
    assert not psutil.wait_procs(below, 15)[1]
