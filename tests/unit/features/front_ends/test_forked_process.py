"""A front end forked from a server that counts, logs and listens: all of that is its own."""

import subprocess
import sys
from pathlib import Path

from tests.support.documentation import ROOT

SCRIPT = """
import asyncio, logging, os, signal, socket, sys
from pathlib import Path
import psutil, uvloop
from lmi_vllm.assembly import load_settings
from lmi_vllm.commands.serve import configure_server_logging
from lmi_vllm.features.front_ends import client_model, starts, template
from lmi_vllm.features.front_ends.channel import Channel, ProcessSetup, StopProcess, VllmImported
from lmi_vllm.features.front_ends.series import series_of_all
from lmi_vllm.features.front_ends.shared_counters import SharedCounters
from lmi_vllm.messages import EngineArguments
from lmi_vllm.telemetry import metrics

starts.why_not_forked = lambda: ""
template.renew_random_numbers = lambda: None
counters = Path(sys.argv[1]) / "counters"

def import_vllm(_):
    logging.getLogger("lmi_vllm.here").info("in the forked process")
    metrics.GENERATED_TOKENS.labels("base").inc(5)

client_model.import_vllm = import_vllm

def values():
    names = ["lmi_generated_tokens_total", "lmi_requests_in_flight"]
    return {one.name: one.value for m in series_of_all(names).collect() for one in m.samples}

async def main():
    settings, told = load_settings({"HF_MODEL_ID": "x/y"}), []
    configure_server_logging(settings, {})
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.append, "SIGTERM")
    listener = socket.create_server(("127.0.0.1", 0))
    metrics.GENERATED_TOKENS.labels("base").inc(2)
    metrics.IN_FLIGHT.set(9)
    logging.getLogger("lmi_vllm.here").info("in the server")
    SharedCounters(counters, 2)
    made = starts.FrontEndStarts()
    made.begin()
    ours, theirs = socket.socketpair()
    with theirs:
        process = await made.start(theirs, asyncio.Event())
    channel = await Channel.over(ours)
    channel.send(ProcessSetup(settings, {}, EngineArguments({}), str(counters), 2, 1))
    assert isinstance(await asyncio.wait_for(channel.receive(), 30), VllmImported)
    seen = psutil.Process(process.pid)
    assert seen.cmdline()[0].strip() == "lmi-vllm::front-end", seen.cmdline()
    assert seen.net_connections("inet") == []
    assert values() == {"lmi_generated_tokens_total": 7, "lmi_requests_in_flight": 9}, values()
    os.kill(process.pid, signal.SIGTERM)
    channel.send(StopProcess())
    assert await asyncio.wait_for(process.wait(), 30) == 0
    assert told == [] and listener.getsockname()
    print(process.pid)
    made.close()

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
logging.shutdown()
"""


def test_log_metrics_and_signals_are_its_own(tmp_path: Path) -> None:
    """Its counters add up, its lines have its number, and SIGTERM is for the server alone."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    environ = {
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        "PYTHONPATH": str(ROOT),
        "LMI_LOG_FORMAT": "json",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (own,) = [line for line in done.stderr.splitlines() if "in the forked process" in line]
    assert f'"pid":{done.stdout.strip()},' in own
    assert done.stderr.count("in the server") == 1
