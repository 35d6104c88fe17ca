"""Checks of a server's life: its device, sleep, death, drain, and what it compiled."""

import concurrent.futures
import re
import subprocess
import sys
import time
from typing import Any

import psutil

from integration import storm
from integration.client import call, running_requests, wait_until
from integration.conftest import ServerProcess
from integration.gpu.models import copy_demo, write_shape
from integration.gpu.suite import PROMPT, READY_SECONDS, Suite, answer, text_of

KEY = "gpu-suite"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
AWAKE_SECONDS = 120.0
CONTEXT_MIB = 200  # less than the context of one process on a device
DRAINED_TOKENS = 400
START_METHODS = ("spawn", "")  # the second: what the server chooses
DRIVER_PROBE = (
    "import torch; from lmi_vllm.engine.vllm.start_method import driver_is_initialized as is_it; "
    "torch.cuda.device_count(); print(is_it()); torch.zeros(1, device='cuda'); print(is_it())"
)
FORKS = "can fork the engine's"  # in the log, once the fork server has shown that it does
USES_THE_DEVICE = """
import torch

async def handle(inputs):
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    return None  # vLLM answers
"""
HEADS_DIVIDE_BY = (1, 2, 4)  # of the embedded model


def starts_on_the_device(suite: Suite) -> str:
    """The engine's process holds memory of the device; elsewhere the server says it is a CPU."""
    with suite.server("--demo") as (server, url):
        assert text_of(url)
        ids = {child.pid for child in server.children()}
        if suite.machine.has_gpu:
            used = suite.machine.memory_used() - suite.idle
            assert used > CONTEXT_MIB, f"{used} MiB more in use than before"
            # Inside a container the driver may name processes of another namespace, or none.
            shown = ids & suite.machine.processes()
            return f"{used} MiB taken, processes of ours shown by the driver: {len(shown)}"
    return f"on the CPU, {len(ids)} process of the engine"


def sleep_and_wake(suite: Suite) -> str:
    """Asleep it refuses and gives its memory back; awake it says what it said before."""
    suite.needs_gpu("vLLM's sleep mode is for CUDA and HIP")
    switches = {
        "OPTION_ENABLE_SLEEP_MODE": "true", "LMI_API_KEY": KEY, "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    model = write_shape(suite)
    with suite.server("--model", str(model), **switches) as (_, url):
        before, used = _tokens(url), suite.machine.memory_used()
        # Gigabytes of weights go to memory that is locked first.
        slept = call(url, "/sleep?level=1", {}, headers=AUTHORIZED, seconds=AWAKE_SECONDS)
        assert slept.status == 200, slept
        asleep = suite.machine.memory_used()
        assert call(url, "/ping").status == 503
        woken = call(url, "/wake_up", {}, headers=AUTHORIZED, seconds=AWAKE_SECONDS)
        assert woken.status == 200, woken
        assert wait_until(lambda: call(url, "/ping").status == 200, AWAKE_SECONDS)
        assert _tokens(url) == before
    assert asleep < used / 2, f"{used} MiB awake, {asleep} asleep"
    return f"{used} MiB awake, {asleep} asleep, the same answer afterwards"


def idle_sleep(suite: Suite) -> str:
    """An idle model falls asleep at each level, and the next request is answered as before."""
    levels = ("stop", "1", "2") if suite.machine.has_gpu else ("stop",)
    notes = []
    for level in levels:
        with suite.server("--demo", LMI_SLEEP_AFTER_SECONDS="2", LMI_SLEEP_LEVEL=level) as (_, url):
            notes.append(f"{level}: {_slept(suite, url, ('', 'json', 'capitals'))}")
    return "; ".join(notes)


def large_idle_sleep(suite: Suite) -> str:
    """The same of a shape: its memory is free while it sleeps, and how long waking takes."""
    suite.needs_gpu("the embedded model is all that a CPU is asked for")
    model, notes = write_shape(suite), []
    for level in ("1", "stop"):
        own = {"LMI_SLEEP_AFTER_SECONDS": "2", "LMI_SLEEP_LEVEL": level, "LMI_WAKE_TIMEOUT": "0"}
        with suite.server("--model", str(model), **own) as (_, url):
            before, used = _tokens(url), suite.machine.memory_used()
            notes.append(f"{level}: {_slept(suite, url)}")
            assert _tokens(url) == before
            assert suite.machine.memory_used() > used / 2
    return "; ".join(notes)


def _slept(suite: Suite, url: str, adapters: tuple[str, ...] = ("",)) -> str:
    """Wait until the model sleeps, wake it by a request, and say what that took and freed."""
    before, used = [text_of(url, adapter=name) for name in adapters], suite.machine.memory_used()
    assert wait_until(lambda: _is_asleep(url), AWAKE_SECONDS)
    asleep = suite.machine.memory_used()
    assert call(url, "/ready").status == call(url, "/health").status == 200
    assert not suite.machine.has_gpu or asleep < used, f"{used} MiB awake, {asleep} asleep"
    began = time.monotonic()
    first = text_of(url, adapter=adapters[0])
    took = time.monotonic() - began
    assert [first, *(text_of(url, adapter=name) for name in adapters[1:])] == before
    return f"{used} MiB awake, {asleep} asleep, answered after {took:.1f} s"


def _is_asleep(url: str) -> bool:
    """Whether the memory is given back, and a request would wake the model."""
    shown = call(url, "/server/sleep").json()
    return shown["status"] == "Asleep" and shown["is_given_back"]


def _tokens(url: str) -> list[int]:
    """Ids: what dummy weights say may be no text."""
    payload = {"inputs": "The river runs", "parameters": {"max_new_tokens": 8, "details": True}}
    found = call(url, "/invocations", payload, headers=AUTHORIZED)
    assert found.status == 200, found
    return [token["id"] for token in found.json()["details"]["tokens"]]


def engine_death(suite: Suite) -> str:
    """A killed engine comes back with its adapters, and what it held is free again."""
    with suite.server("--demo", SERVING_RETRY_THRESHOLD="1") as (server, url):
        alone = [text_of(url, adapter=name) for name in ("", "json")]
        used = suite.machine.memory_used()
        took = _killed_and_back(server, url)
        assert [text_of(url, adapter=name) for name in ("", "json")] == alone
        return f"back after {took:.1f} s; {suite.freed(used)}"


def unfit_server(suite: Suite) -> str:
    """A server whose code takes a CUDA context cannot fork; another process forks its next engine.

    Without a GPU that process is asked for.
    """
    model = copy_demo(suite.scratch() / "model", entryPoint="model.py")
    (model / "model.py").write_text(USES_THE_DEVICE)
    own = {} if suite.machine.has_gpu else {"VLLM_WORKER_MULTIPROC_METHOD": "forkserver"}
    with suite.server("--model", str(model), SERVING_RETRY_THRESHOLD="1", **own) as (server, url):
        before = text_of(url)
        assert wait_until(lambda: FORKS in server.stderr, READY_SECONDS), server.describe()
        if suite.machine.has_gpu:
            assert "CUDA is initialised in the server's process" in server.stderr
        took = _killed_and_back(server, url)
        assert text_of(url) == before
        assert "is spawned" not in server.stderr
    return f"back after {took:.1f} s"


def _killed_and_back(server: ServerProcess, url: str) -> float:
    """Kill the engine; return after how many seconds the server is healthy again."""
    # Where the engine is spawned, multiprocessing has a process of its own beside it.
    engine = max(server.children(), key=lambda child: child.memory_info().rss)
    began = time.monotonic()
    engine.kill()
    assert wait_until(lambda: call(url, "/ping").status != 200, 60)
    assert wait_until(lambda: _is_healthy(server, url), READY_SECONDS)
    return time.monotonic() - began


def _is_healthy(server: ServerProcess, url: str) -> bool:
    assert server.process.poll() is None, server.describe()
    return call(url, "/ping").status == 200


def forked_engine(suite: Suite) -> str:
    """An engine is forked by itself, answers as a spawned one, and need not import vLLM again.

    On a GPU the driver must be seen as not initialised before, and as initialised once it is.
    """
    seconds, texts = {}, set()
    for method in START_METHODS:
        own = {"VLLM_WORKER_MULTIPROC_METHOD": method} if method else {}
        began = time.monotonic()
        with suite.server("--demo", **own) as (server, url):
            seconds[method or "default"] = time.monotonic() - began
            texts.add((text_of(url), text_of(url, adapter="json")))
            if not method:
                # Our line, or vLLM's own.
                assert not re.search("is spawned|must use the `spawn`", server.stderr)
    assert len(texts) == 1, texts
    if suite.machine.has_gpu:
        command = [sys.executable, "-c", DRIVER_PROBE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["False", "True"], (done.stdout, done.stderr[-400:])
    return "ready after " + ", ".join(f"{took:.1f} s ({how})" for how, took in seconds.items())


def drain_leaves_nothing(suite: Suite) -> str:
    """SIGTERM under load: what was asked is answered, then no process and no memory is left."""
    parameters = {"max_new_tokens": DRAINED_TOKENS, "ignore_eos": True, "details": True}
    asked = {"inputs": PROMPT, "parameters": parameters}
    with suite.server("--demo") as (server, url):
        children = server.children()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(answer, url, asked) for _ in range(8)]
            assert wait_until(lambda: running_requests(url) > 0, 30)
            server.process.terminate()
            counts = [one.result()["details"]["generated_tokens"] for one in answers]
        assert counts == [DRAINED_TOKENS] * 8
        assert server.wait_exit(60) == 0
        gone, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, alive
        left = {child.pid for child in children} & suite.machine.processes()
        assert not left, left
    return f"{len(gone)} processes ended; {suite.freed(suite.idle)}"


def compile_cache(suite: Suite) -> str:
    """What one start compiled, the next one on an empty disk finds: it is faster by that."""
    store, seconds, texts = suite.scratch(), [], []
    model = copy_demo(suite.scratch() / "model", enforce_eager="false", enable_lora="false")
    for number in range(2):
        disk = suite.scratch()
        own = {"HOME": str(disk), "XDG_CACHE_HOME": str(disk / ".cache")}
        own["LMI_CACHE_URI"] = str(store / "cache")
        began = time.monotonic()
        with suite.server("--model", str(model), **own) as (server, url):
            seconds.append(time.monotonic() - began)
            texts.append(text_of(url))
            if number == 0:
                assert wait_until(lambda: any((store / "cache").rglob("*.tar.gz")), 120)
            else:
                assert re.search("restored", server.stderr), "nothing was restored"
    assert texts[0] == texts[1]
    assert seconds[1] < seconds[0]
    return f"ready after {seconds[0]:.1f} s, with the cache {seconds[1]:.1f} s"


def tensor_parallel(suite: Suite) -> str:
    """`max` takes every device that the heads divide by, and the answers are those of one.

    Sums over devices round otherwise, so on a GPU the answer begins as that of its own weights.
    """
    fitting = [size for size in HEADS_DIVIDE_BY if size <= suite.machine.count]
    with suite.server("--demo", OPTION_TENSOR_PARALLEL_DEGREE="1") as (_, url):
        alone = {name: {PROMPT: text_of(url, adapter=name)} for name in ("", "json", "capitals")}
    with suite.server("--demo", OPTION_TENSOR_PARALLEL_DEGREE="max") as (server, url):
        assert wait_until(lambda: any(map(_names_arguments, server.log)), 30)
        told = next(filter(_names_arguments, server.log))
        size = told["engine_arguments"]["tensor_parallel_size"]["value"]
        assert int(size) == fitting[-1], f"{size} of {suite.machine.count} devices"
        texts = {name: text_of(url, adapter=name) for name in alone}
        for name, text in texts.items():
            assert storm.nearest(alone, PROMPT, text) == {name}, (name, text, alone)
        same = sum(text == alone[name][PROMPT] for name, text in texts.items())
        assert suite.machine.has_gpu or same == len(texts), (texts, alone)
    return f"tensor_parallel_size={size}, {same} of {len(texts)} answers word for word"


def _names_arguments(row: dict[str, Any]) -> bool:
    """Whether a line of the log is the one of a finished start; it may come after `Ready on`."""
    return "engine_arguments" in row
