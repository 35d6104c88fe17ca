"""Which records of vLLM's log are steps of a start, and how they come from other processes."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmi_vllm.engine.vllm.start_steps import MARKS, ORDER, STEPS_VARIABLE, step_of
from lmi_vllm.features.start_steps.reading import enter, following, reading_steps
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.start_progress import Phase, StartProgress
from lmi_vllm.server.context import ServerEvents

LINES = (
    ("lmi_vllm.engine.vllm.factory", "importing vLLM", "import", {}),
    ("vllm.v1.engine.core", "Initializing a V1 LLM engine (v0.32.0) with config: x", "set-up", {}),
    ("tqdm", "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:10<00:10]",
     "weights", {"weight_files": 2, "weight_files_total": 4}),
    ("vllm.v1.worker", "Model loading took 14.99 GiB memory and 3.1 seconds",
     "profile", {"weights_gib": 14.99}),
    ("vllm.compilation.monitor", "Starting torch.compile", "compilation", {}),
    ("vllm.compilation.decorators", "Directly load AOT compilation from path /c/model",
     "compilation", {"from_cache": True}),
    ("vllm.compilation.backends", "Directly load the compiled graph(s) for compile range (1, 8) "
     "from the cache, took 0.1 s", "compilation", {"from_cache": True}),
    ("vllm.compilation.backends", "Compiling a graph for compile range (1, 8192) takes 9.12 s",
     "compilation", {"compiled": True}),
    ("vllm.compilation.decorators", "[backbone] saved AOT compiled function to /c/model",
     "compilation", {"compiled": True}),
    ("vllm.core", "GPU KV cache size: 393,216 tokens, Maximum concurrency for 8 tokens: 3x",
     "KV cache", {"kv_cache_tokens": 393216}),
    ("tqdm", "Capturing CUDA graphs (decode, FULL):  33%|###  | 12/36 [00:01<00:02]",
     "graphs", {"graphs": 12, "graphs_total": 36}),
    ("vllm.v1.engine.core", "init engine (profile, create kv cache, warmup model) took 3.2 s",
     "application", {}),
)  # fmt: skip


def record(name: str, text: str) -> logging.LogRecord:
    """Return a record."""
    return logging.LogRecord(name, logging.INFO, __file__, 1, text, (), None)


@pytest.mark.parametrize(("name", "text", "step", "figures"), LINES)
def test_step_and_its_figures(
    name: str, text: str, step: str, figures: Mapping[str, float]
) -> None:
    """As vLLM 0.32 words them."""
    assert step_of(record(name, text)) == (step, figures)
    assert step_of(record("another.library", text)) is None


def test_record_that_cannot_be_read_is_no_step() -> None:
    """An error in a filter would end the engine."""
    name = "vllm.v1.engine.core"
    assert step_of(logging.LogRecord(name, logging.INFO, "", 1, "%d", ("x",), None)) is None
    assert step_of(logging.LogRecord(name, logging.INFO, "", 1, {"a": 1}, (), None)) is None


def test_words_are_those_of_the_installed_vllm() -> None:
    """Each text of the table that has no variable part is in vLLM's code."""
    vllm = Path(pytest.importorskip("vllm").__file__).parent
    folders = (
        "v1/engine",
        "v1/worker",
        "v1/core",
        "config",
        "compilation",
        "model_executor/model_loader",
    )
    code = "".join(
        path.read_text("utf-8") for folder in folders for path in (vllm / folder).rglob("*.py")
    )
    for words in (
        "Resolved architecture", "Initializing a V1 LLM engine", "Starting to load model",
        "Loading weights took", "Model loading took %s GiB", "Starting torch.compile",
        "Warming up model for the compilation", "Directly load the compiled graph",
        "Directly load AOT compilation", "Compiling a graph for compile range",
        "saved AOT compiled function",
        "Available KV cache memory: %s GiB", "%s KV cache size: %s tokens",
        "Capturing CUDA graphs", "Graph capturing finished", "init engine (",
    ):  # fmt: skip
        assert words in code, words
    assert len({step for step, _ in MARKS}) == len(ORDER)


def test_progress_goes_forward_and_ends_with_the_phase() -> None:
    """Several processes of one engine log the same steps, some of them late."""
    clock = iter(range(100))
    start = StartProgress(lambda: float(next(clock)))
    lifecycle = Lifecycle()
    lifecycle.start = start
    enter(start, "import", {})
    assert "step" not in lifecycle.ping()[1]["model"]  # it may be another phase
    start.enter(Phase.ENGINE)
    enter(start, "weights", {"weight_files": 1})
    enter(start, "set-up", {})
    enter(start, "weights", {"weight_files": 2})
    entry = lifecycle.ping()[1]["model"]
    assert (entry["step"], entry["weight_files"]) == ("weights", 2)
    assert entry["step_seconds"] > 0
    start.enter(Phase.ADAPTERS)
    enter(start, "graphs", {})
    assert "step" not in lifecycle.ping()[1]["model"]
    assert list(start.step_seconds) == ["import", "weights"]
    start.restart()
    assert not start.step_seconds
    enter(start, "set-up", {})
    assert lifecycle.ping()[1]["model"]["step"] == "set-up"


def test_bytes_of_weights_are_told_by_files(caplog: pytest.LogCaptureFixture) -> None:
    """The bar counts files; the one of a draft model has another number of them."""
    caplog.set_level(logging.INFO)
    start = StartProgress()
    start.enter(Phase.ENGINE)
    start.expect_weights((3_000_000_000, 1_000_000_000))
    enter(start, "weights", {})
    assert start.progress["weight_bytes"] == 0
    assert start.progress["weight_bytes_total"] == 4_000_000_000
    enter(start, "weights", {"weight_files": 1, "weight_files_total": 2})
    assert start.progress["weight_bytes"] == 3_000_000_000
    assert start.progress["weight_bytes_total"] == 4_000_000_000
    assert start.weight_files_read == 1
    enter(start, "weights", {"weight_files": 1, "weight_files_total": 1})
    assert start.figures["weight_bytes"] == 3_000_000_000
    enter(start, "profile", {"weights_gib": 3.7})
    assert (
        "starting the engine: profile (weights 0.0 s (4 of 4 GB, 2 of 2 files, 3.7 GiB in memory))"
        in caplog.text
    )
    start.restart()
    assert not start.figures


@pytest.fixture
def handler() -> Iterator[logging.Handler]:
    """Return a handler of the root that drops all vLLM says below a warning."""
    own = logging.StreamHandler()
    own.addFilter(lambda record: record.levelno >= logging.WARNING)
    root = logging.getLogger()
    root.addHandler(own)
    level = root.level
    root.setLevel(logging.INFO)
    yield own
    root.setLevel(level)
    root.removeHandler(own)


SPAWNED = """
import logging, os
from lmi_vllm.engine.vllm.processes import LOG_FORMAT_VARIABLE, log_as_the_server
os.environ[LOG_FORMAT_VARIABLE] = "json"
log_as_the_server()
logging.getLogger("vllm.v1.engine.core").info("Starting to load model %s...", "x")
"""


@pytest.mark.usefixtures("handler")
def test_steps_come_from_this_process_and_from_spawned_ones() -> None:
    """Also where the line itself is left out of the log."""
    start = StartProgress()
    start.enter(Phase.ENGINE)
    with following(start):
        logging.getLogger("vllm.v1.engine.core").info("Initializing a V1 LLM engine (v%s)", "1")
        _wait_for(start, "set-up")
        subprocess.run([sys.executable, "-c", SPAWNED], check=True, capture_output=True)
        _wait_for(start, "weights")
    assert STEPS_VARIABLE not in os.environ


def _wait_for(start: StartProgress, step: str) -> None:
    until = time.monotonic() + 20
    while start.step != step and time.monotonic() < until:
        time.sleep(0.02)
    assert start.step == step


async def test_further_front_end_process_logs_no_steps(caplog: pytest.LogCaptureFixture) -> None:
    """It imports vLLM and starts no engine."""
    caplog.set_level(logging.INFO)
    service = SimpleNamespace(lifecycle=Lifecycle())
    for events in (ServerEvents(), ServerEvents(is_first=False)):
        caplog.clear()
        async with reading_steps(cast("Any", service), cast("Any", None), {}, events):
            logging.getLogger("lmi_vllm.engine.vllm.factory").info("importing vLLM")
            await asyncio.sleep(0.2)
        assert ("starting the engine: import" in caplog.text) is events.is_first
