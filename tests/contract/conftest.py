"""One engine of each kind for the session, both driven from one event loop in a thread."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.fork_server import EngineParents
from lmi_vllm.engine.vllm.forks import new_engine_thread
from lmi_vllm.engine.vllm.workarounds import Scope
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import (
    EngineArguments,
    GenerationChunk,
    GenerationJob,
    RequestLimits,
    ServingProfile,
)
from tests.support.assembled import PARTS
from tests.support.engine_modules import import_engine_modules
from tests.support.engine_starts import STARTS

DEMO_ADAPTERS = DEMO_MODEL_DIR / "adapters"
DEMO_ARGUMENTS = {
    "model": str(DEMO_MODEL_DIR),
    "dtype": "float32",
    "enforce_eager": True,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 2,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 1 << 27,
}
NO_ADAPTERS: dict[str, Any] = {"enable_lora": False, "max_loras": 1, "max_cpu_loras": None}
Run = Callable[..., Any]

# Threads bound to the cores of a busy machine wait for each other (conftest.py of the root).
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault(
    "NUMBA_NUM_THREADS", "1"
)  # a test imports numba: start.py leaves it alone then


class LoopThread:
    """AsyncLLM belongs to one event loop: this one, for the whole session."""

    def __init__(self) -> None:
        self._hung = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, Any], timeout: float = 120) -> Any:
        """Run `work` on the loop and return its result.

        Raises:
            AssertionError: it took longer than `timeout` seconds, or another work did before: who
                waits for an engine that hangs fails at once, not each test after its own time.
        """
        if self._hung:
            work.close()
            raise AssertionError(f"the engine hangs since {self._hung}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if not concurrent.futures.wait([future], timeout).done:
            self._hung = os.environ.get("PYTEST_CURRENT_TEST", "the end of the session")
            raise AssertionError(f"no end within {timeout:g} s")
        return future.result()

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def plain_tokenizers() -> Iterator[None]:
    """Let tokenizers be plain, which an engine of this process has changed to its end."""
    applied = workarounds.apply_to_the_end(Scope.TOKENIZERS)
    applied.close()
    yield
    applied.enter_context(workarounds.apply(Scope.TOKENIZERS))


@pytest.fixture(scope="session")
def run() -> Iterator[LoopThread]:
    """Run coroutines on the session's event loop."""
    loop = LoopThread()
    yield loop
    loop.stop()


def start_demo_engine(run: LoopThread, *, grammar_timeout: float = 5, **changes: object) -> Engine:
    """Return a running vLLM over the embedded model."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from lmi_vllm.engine.vllm.factory import start_vllm_engine  # noqa: PLC0415 (imports vLLM)

    import_engine_modules()
    arguments = EngineArguments(DEMO_ARGUMENTS | changes)
    limits = RequestLimits(grammar_timeout=grammar_timeout)
    profile = ServingProfile(model_name="demo", enable_lora=True, limits=limits)
    with STARTS.timed("contract"):
        engine: Engine = run(
            start_vllm_engine(
                arguments, profile, EngineParents(new_engine_thread()), PARTS.engines.vllm
            ),
            300,
        )
    return engine


@pytest.fixture(scope="session")
def vllm_engine(run: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The real engine over the embedded model, started once; it publishes what its cache keeps."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('events')}/kv"
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    engine = start_demo_engine(run, kv_events_config=published)
    yield engine
    run(engine.close())


@pytest.fixture(scope="session")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny BERT that embeds; its letter q is NaN."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.tiny_models import bert_embedder  # noqa: PLC0415 (imports torch)

    return bert_embedder(tmp_path_factory.mktemp("models") / "embedder", is_marked_not_finite=True)


@pytest.fixture(scope="session")
def ranker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny cross-encoder; its letter q is NaN."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.tiny_models import bert_ranker  # noqa: PLC0415 (imports torch)

    return bert_ranker(tmp_path_factory.mktemp("models") / "ranker", is_marked_not_finite=True)


@pytest.fixture(scope="session")
def embedder(run: LoopThread, embedder_folder: Path) -> Iterator[Engine]:
    """A running engine over it, started as vLLM would find out by itself: no runner, no convert."""
    engine = start_demo_engine(run, model=str(embedder_folder), **NO_ADAPTERS)
    yield engine
    run(engine.close())


@pytest.fixture(scope="session")
def ranker(run: LoopThread, ranker_folder: Path) -> Iterator[Engine]:
    """A running engine over the cross-encoder."""
    engine = start_demo_engine(run, model=str(ranker_folder), **NO_ADAPTERS)
    yield engine
    run(engine.close())


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 with random weights, written once."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.text_models import tiny_t5  # noqa: PLC0415 (imports torch)

    return tiny_t5(tmp_path_factory.mktemp("models") / "t5")


def start_t5_engine(run: LoopThread, folder: Path, **changes: object) -> Engine:
    """Return a running Transformers engine over the model in `folder`."""
    from lmi_vllm.features.seq2seq.engine import (  # noqa: PLC0415 (imports torch)
        start_transformers_engine,
    )

    arguments = EngineArguments({"model": str(folder), "dtype": "float32", **changes})
    return cast(Engine, run(start_transformers_engine(arguments, ServingProfile()), 120))


@pytest.fixture(scope="session")
def t5_engine(run: LoopThread, t5_folder: Path) -> Iterator[Engine]:
    """The Transformers engine over a tiny T5, started once."""
    engine = start_t5_engine(run, t5_folder)
    yield engine
    run(engine.close())


@pytest.fixture(
    params=[
        "scripted",
        pytest.param("vllm_engine", marks=pytest.mark.vllm),
        pytest.param("t5_engine", marks=pytest.mark.vllm),
    ]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn: the double cannot drift from the real ones."""
    if request.param == "scripted":
        return ScriptedEngine(refused_adapters={"broken": "no such folder"})
    engine: Engine = request.getfixturevalue(request.param)
    return engine


@pytest.fixture(scope="session")
def adapter_folder() -> Callable[[str], str]:
    """Return the folder of an embedded adapter by name."""
    return lambda name: str(Path(DEMO_ADAPTERS) / name)


async def collect(engine: Engine, job: GenerationJob) -> list[GenerationChunk]:
    """Return all chunks of a job."""
    return [chunk async for chunk in engine.generate(job)]


async def answer(engine: Engine, prompt: str, **fields: Any) -> str:
    """Return the greedy text for a prompt; `fields` are those of GenerationJob."""
    sampling = {"max_tokens": 24, "temperature": 0.0, **fields.pop("sampling", {})}
    job = GenerationJob(f"test-{prompt[:8]}", prompt, sampling, **fields)
    return "".join(chunk.text for chunk in await collect(engine, job))
