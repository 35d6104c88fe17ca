"""Two CPU ranks: tensor, pipeline and data parallel answer what one rank does, and end with it.

With data parallelism a change of an adapter is made on both ranks, or on none.

The embedded model and its adapters. vLLM places CPU ranks with VLLM_CPU_OMP_THREADS_BIND set.
"""

import asyncio
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.client import OpenStream, call, wait_until
from integration.conftest import RunningServer, ServerProcess, StartServer
from integration.server_exit_cleans_up import are_gone
from integration.storm import OPTIONS, rage, report
from tests.support.adapter_files import WEIGHTS, copy_adapter, make_adapter, write_safetensors

pytestmark = pytest.mark.vllm
FOUND_DEAD_SECONDS = 30.0
SEEN_SECONDS = 4.0
LONG = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 1800, "ignore_eos_token": True},
}
TOPOLOGIES = {
    "tensor": {"OPTION_TENSOR_PARALLEL_DEGREE": "2"},
    "pipeline": {"OPTION_PIPELINE_PARALLEL_DEGREE": "2"},
}
# An operator's extension of the workers, whose import makes the second rank refuse some adapters.
# It notes beside itself what each rank reads and drops.
REFUSING = """
from vllm.lora.worker_manager import WorkerLoRAManager

begin, load = WorkerLoRAManager.__init__, WorkerLoRAManager._load_adapter
drop, pin = WorkerLoRAManager.remove_adapter, WorkerLoRAManager.pin_adapter

def note(manager, *words):
    with open(__file__ + ".notes", "a") as notes:
        print(manager.rank, *words, file=notes)

def know_the_rank(manager, config, *rest, **more):
    manager.rank = config.parallel_config.data_parallel_index
    begin(manager, config, *rest, **more)

def load_or_refuse(manager, request):
    with open(request.lora_path + "/adapter_config.json") as config:
        marks = config.read()
    if '"half"' in marks and manager.rank == 1:
        raise ValueError("the second rank refuses it")
    if '"loose"' in marks:
        manager.loose = request.lora_int_id
    note(manager, "reads", request.lora_int_id)
    return load(manager, request)

def remove_adapter(manager, number):
    note(manager, "drops", number)
    return drop(manager, number)

def pin_or_refuse(manager, number):
    if number == getattr(manager, "loose", None) and manager.rank == 1:
        raise ValueError("the second rank does not pin it")
    note(manager, "pins", number)
    return pin(manager, number)

WorkerLoRAManager.__init__ = know_the_rank
WorkerLoRAManager.pin_adapter = pin_or_refuse
WorkerLoRAManager._load_adapter = load_or_refuse
WorkerLoRAManager.remove_adapter = remove_adapter

class Refusing:
    pass
"""
STORM_SECONDS = 15
DATA_PARALLEL = {"OPTION_DATA_PARALLEL_SIZE": "2", **OPTIONS}
PROMPTS = ("The capital of France is", "Once upon a time", "A list of colours:")


def start(server_process: StartServer, topology: str) -> tuple[ServerProcess, str]:
    """Return a ready server on two ranks and its URL."""
    server = server_process("--demo", "--port", "0", environ=TOPOLOGIES[topology], is_forked=True)
    return server, server.url_when_ready()


def answers(url: str) -> list[Any]:
    """Return what is said to every prompt by the model and its adapters, all asked at once."""
    payloads: list[dict[str, Any]] = [
        {"inputs": prompt, "parameters": {"max_new_tokens": 8, "details": True}} | extra
        for prompt in PROMPTS
        for extra in ({}, {"adapters": "capitals"}, {"adapters": "json"})
    ]
    payloads += [
        {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 8}
        for prompt in PROMPTS
    ]

    def said(payload: dict[str, Any]) -> Any:
        answer = call(url, "/invocations", payload, seconds=120)
        assert answer.status == 200, answer.body
        body = json.loads(answer.body)
        if "choices" in body:
            return body["choices"][0]["message"]["content"]
        return [token["id"] for token in body["details"]["tokens"]]

    with ThreadPoolExecutor(len(payloads)) as clients:
        return list(clients.map(said, payloads))


def shared_by_ranks() -> set[str]:
    """Return the files of shared memory that CPU ranks make for their sums."""
    return {path.name for path in Path("/dev/shm").glob("vllm_dist_*")}


def requests_by_rank(url: str) -> list[float]:
    """Return how many requests each of vLLM's engine cores finished."""
    text = call(url, "/metrics").body.decode()
    found: dict[str, float] = {}
    pattern = r'^vllm:request_success_total\{engine="(\d+)".*\} (\S+)$'
    for engine, count in re.findall(pattern, text, re.MULTILINE):
        found[engine] = found.get(engine, 0.0) + float(count)
    return [found[engine] for engine in sorted(found)]


def adapters_by_rank(url: str) -> dict[str, set[tuple[str, str]]]:
    """Return the adapters that each rank holds and where, by the number of its engine core."""
    text = call(url, "/metrics").body.decode()
    pattern = r'^vllm:lora_adapter_loaded{adapter_name="(\w+)",engine="(\d+)",level="(\w+)"'
    found: dict[str, set[tuple[str, str]]] = {}
    for name, engine, level in re.findall(pattern, text, re.MULTILINE):
        found.setdefault(engine, set()).add((name, level))
    return found


def see_a_worker_die(server: ServerProcess, url: str, worker: psutil.Process) -> None:
    """Kill it: a stream gets its error at once, where the engine itself says so after nine seconds.

    The server ends with 1, and its last line has the worker's name and the signal.
    """
    stream = OpenStream(url, "/invocations", {**LONG, "stream": True})
    worker.kill()
    began = time.monotonic()
    assert json.loads(stream.rest().splitlines()[-1])["code"] == 500
    assert time.monotonic() - began < SEEN_SECONDS
    assert server.wait_exit() == 1, server.describe()
    last = f"a worker of the engine died (VLLM::Worker_TP1, process {worker.pid})"
    expected_line = f"lmi-vllm: error: {last}: killed by SIGKILL"
    assert server.stderr.splitlines()[-1] == expected_line


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_two_ranks_answer_as_one(
    server_process: StartServer, demo_server: RunningServer, topology: str
) -> None:
    """Same tokens for the model and both adapters; nothing is left however it ends.

    After SIGTERM it exits 0, after one of two tensor ranks was killed 1, with a reason.
    """
    expected = answers(demo_server.url)
    segments = shared_by_ranks()
    server, url = start(server_process, topology)
    assert shared_by_ranks() <= segments  # they are removed once every rank has them
    assert answers(url) == expected
    assert answers(url) == expected
    ranks = server.children()
    assert len(ranks) >= 2, ranks
    if topology == "tensor":
        workers = [rank for rank in ranks if "Worker" in rank.name()]
        assert len(workers) == 2, ranks
        see_a_worker_die(server, url, workers[1])
    else:
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait_exit() == 0, server.describe()
    wait_until(lambda: are_gone(ranks), FOUND_DEAD_SECONDS)


def test_an_adapter_that_the_workers_refuse_disturbs_no_later_one(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Both fail at it; what the second one says is no answer to the next call."""
    _, url = start(server_process, "tensor")
    before = answers(url)
    bad = copy_adapter(tmp_path / "bad", target_modules=["embed_tokens"])
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    write_safetensors(bad / WEIGHTS, {f"{name}A": (16, 1288), f"{name}B": (128, 16)})
    for _ in range(2):
        refused = call(url, f"/adapters?name=bad&src={bad}", method="POST")
        assert (refused.status, b"vocabulary size" in refused.body) == (424, True), refused.body
    good = make_adapter(tmp_path / "good", 1)
    assert call(url, f"/adapters?name=good&src={good}", method="POST").status == 200
    assert answers(url) == before


def refuse_by_one_rank(url: str, folder: Path, notes: Path) -> None:
    """Register what the second rank refuses; the first rank drops it again."""
    notes.unlink()
    half = make_adapter(folder / "half", 2, revision="half")
    refused = call(url, f"/adapters?name=half&src={half}", method="POST")
    assert (refused.status, b"second rank refuses" in refused.body) == (424, True), refused.body
    rows = [line.split() for line in notes.read_text(encoding="utf-8").splitlines()]
    first = [row[1:] for row in rows if row[0] == "0"]
    assert first[0][0] == "reads"
    assert first[-1] == ["drops", first[0][1]]
    asked = call(url, "/invocations", {"inputs": "x", "adapters": "half"})
    assert b"not found" in asked.body, asked.body


def refuse_to_replace_and_to_pin(url: str, folder: Path, notes: Path) -> None:
    """What one rank does not replace or pin, no rank does; the old weights go on."""
    body = {"inputs": PROMPTS[0], "adapters": "turn", "parameters": {"max_new_tokens": 12}}
    first = make_adapter(folder / "first", 3)
    half = make_adapter(folder / "second", 4, revision="half")
    replacement = {"lora_name": "turn", "lora_path": str(half), "load_inplace": True}
    for pin in ("false", "true"):
        created = call(url, f"/adapters?name=turn&src={first}&pin={pin}", method="POST")
        assert created.status == 200, created.body
        before = {call(url, "/invocations", body).body for _ in range(4)}
        assert len(before) == 1
        refused = call(url, "/v1/load_lora_adapter", replacement)
        assert (refused.status, b"second rank refuses" in refused.body) == (400, True), refused.body
        assert {call(url, "/invocations", body).body for _ in range(8)} == before
        held = adapters_by_rank(url)
        assert all(("turn", "gpu") in held[rank] for rank in "01"), held
        assert call(url, "/adapters/turn", method="DELETE").status == 200
    notes.unlink()
    loose = make_adapter(folder / "loose", 5, revision="loose")
    refused = call(url, f"/adapters?name=loose&src={loose}&pin=true", method="POST")
    assert (refused.status, b"does not pin it" in refused.body) == (507, True), refused.body
    rows = [line.split() for line in notes.read_text(encoding="utf-8").splitlines()]
    number = next(row[2] for row in rows if row[1] == "reads")
    assert ["0", "pins", number] in rows
    for rank in "01":
        assert [row for row in rows if row[0] == rank][-1][1:] == ["drops", number]
    assert b"not found" in call(url, "/invocations", body | {"adapters": "loose"}).body
    taken = call(url, f"/adapters?name=turn&src={first}&pin=true", method="POST")
    assert taken.status == 200, taken.body  # its slot is free again
    assert call(url, "/adapters/turn", method="DELETE").status == 200


def test_data_parallel_ranks_change_adapters_together(
    server_process: StartServer, demo_server: RunningServer, tmp_path: Path
) -> None:
    """Answers are those of one rank, and both ranks have every adapter, or neither.

    What the second rank alone refuses is refused, and leaves the first. Then a storm over both.
    """
    expected = answers(demo_server.url)
    (tmp_path / "refusing.py").write_text(REFUSING, encoding="utf-8")
    notes = tmp_path / "refusing.py.notes"
    added = {"PYTHONPATH": str(tmp_path), "OPTION_WORKER_EXTENSION_CLS": "refusing.Refusing"}
    server = server_process("--demo", "--port", "0", environ=DATA_PARALLEL | added, is_forked=True)
    url = server.url_when_ready()
    assert answers(url) == expected
    busy = requests_by_rank(url)
    assert len(busy) == 2
    assert all(count >= 1 for count in busy), busy
    both = {("capitals", "gpu"), ("json", "gpu")}
    assert wait_until(lambda: adapters_by_rank(url) == {"0": both, "1": both}, 30)
    refuse_by_one_rank(url, tmp_path, notes)
    refuse_to_replace_and_to_pin(url, tmp_path, notes)
    storm = asyncio.run(rage(url, STORM_SECONDS, seed=int(time.time())))
    print(report(storm))
    assert not storm.wrong, server.describe()
    assert storm.counts["checked"] > 30
    ranks = server.children()
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.wait_exit() == 0, server.describe()
    wait_until(lambda: are_gone(ranks), FOUND_DEAD_SECONDS)
