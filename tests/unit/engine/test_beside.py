"""What is imported beside the engine: after its process was forked, before the start goes on."""

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from lmi_vllm.engine.vllm.beside import after_the_fork
from lmi_vllm.engine.vllm.forks import new_engine_thread


def forked(run: Callable[[], int] = int) -> int:
    """Fork a process that runs this and ends; return what it has returned."""
    pid = os.fork()
    if pid == 0:
        os._exit(run())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_engine_thread(body: Callable[[], None]) -> None:
    """Run the body in the thread that forks engines."""
    with new_engine_thread() as thread:
        thread.submit(body).result(60)


def test_call_begins_after_the_fork_and_ends_in_the_body() -> None:
    """In another thread, so that the engine's process is not waited for."""
    seen: list[object] = []
    is_beside = threading.Event()

    def call() -> None:
        is_beside.wait(60)
        seen.append(threading.current_thread())

    def body() -> None:
        with after_the_fork(call):
            seen.append("before")
            forked()
            seen.append("beside")
            is_beside.set()
        seen.append("after")
        forked()  # nothing waits for this one

    in_engine_thread(body)
    assert [seen[0], seen[1], seen[3]] == ["before", "beside", "after"]
    assert len(seen) == 4


def test_without_a_fork_of_the_engine_thread_nothing_is_called() -> None:
    """A spawned engine, a fork of another thread, and an engine core that forks its workers."""
    calls: list[int] = []

    def core() -> int:
        forked()
        for thread in threading.enumerate():
            if thread.name == "lmi-vllm-beside":
                thread.join()
        return len(calls)

    def body() -> None:
        with after_the_fork(lambda: calls.append(1)):
            other = threading.Thread(target=forked)
            other.start()
            other.join()
        assert forked() == 0
        assert calls == []
        with after_the_fork(lambda: calls.append(1)):
            assert forked(core) == 0

    in_engine_thread(body)
    assert calls == [1]


def test_exception_of_the_call_is_left_to_the_next_one() -> None:
    """The import is made again where it is needed, and fails there."""

    def call() -> None:
        raise ImportError

    def body() -> None:
        with after_the_fork(call):
            forked()

    in_engine_thread(body)


@pytest.mark.parametrize("engines", [1, 2])
def test_only_one_engine_core_has_the_import_beside_it(
    engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would be forked while the thread imports."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from lmi_vllm.engine.vllm import start  # noqa: PLC0415 (imports vLLM)

    calls: list[int] = []
    monkeypatch.setattr(start, "import_front_end", lambda: calls.append(1))
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=engines))

    def body() -> None:
        with start._front_end_beside(config):
            forked()

    in_engine_thread(body)
    assert len(calls) == (engines == 1)
