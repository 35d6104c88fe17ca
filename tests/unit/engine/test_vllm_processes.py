"""Run without vLLM: processes forked from the engine thread, and the root-cause file."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from lmi_vllm.engine.vllm.forks import ENGINE_THREAD_NAME, new_engine_thread
from lmi_vllm.engine.vllm.processes import (
    ENGINE_LOGGERS,
    read_root_cause,
    read_worker_end,
    register_plugin,
    watch_root_causes,
    worker_ends,
)

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: prctl and /proc")


def test_engine_thread_is_one_named_thread() -> None:
    """Every engine process is forked from the same thread, which is known by its name."""
    with new_engine_thread() as thread:
        names = {thread.submit(lambda: threading.current_thread().name).result() for _ in "ab"}
    assert names == {f"{ENGINE_THREAD_NAME}_0"}


@pytest.mark.parametrize("name", ENGINE_LOGGERS)
def test_root_cause_is_every_logged_exception(tmp_path: Path, name: str) -> None:
    """While watched, an exception that an engine process logs is kept as one line."""
    path, logger = tmp_path / "errors", logging.getLogger(name)
    stop = watch_root_causes(str(path))
    logger.error("it failed")
    logger.error("it failed", exc_info=ValueError("first\nsecond"))
    stop()
    logger.error("it failed", exc_info=ValueError("too late"))
    assert path.read_text() == "ValueError: first second\n"


def test_root_cause_without_a_text_is_the_line_that_raised_it(tmp_path: Path) -> None:
    """As vLLM's check of the rows of an embedding; the start ended with `AssertionError:`."""
    path, logger = tmp_path / "errors", logging.getLogger(ENGINE_LOGGERS[0])
    vocab_size = 3
    stop = watch_root_causes(str(path))
    try:
        assert vocab_size == 4
    except AssertionError as error:
        error.args = ()
        logger.exception("it failed")
    stop()
    place = "(in test_root_cause_without_a_text_is_the_line_that_raised_it, test_vllm_processes.py)"
    assert path.read_text() == f"AssertionError: assert vocab_size == 4 {place}\n"


CAUSES = {
    "first that says something": ("See root cause above\nValueError: x\nlater\n", "ValueError: x"),
    "only pointers": ("See root cause above\n", None),
    "empty": ("", None),
}


@pytest.mark.parametrize(("text", "cause"), CAUSES.values(), ids=CAUSES)
def test_root_cause_is_read(tmp_path: Path, text: str, cause: str | None) -> None:
    """The first line that says more than "see above" is the cause."""
    path = tmp_path / "errors"
    path.write_text(text)
    assert read_root_cause(path) == cause


def test_root_cause_file_may_be_missing(tmp_path: Path) -> None:
    """A folder that is gone spoils neither the logging nor the reading."""
    path = tmp_path / "gone" / "errors"
    stop = watch_root_causes(str(path))
    logging.getLogger(ENGINE_LOGGERS[0]).error("it failed", exc_info=ValueError("x"))
    stop()
    assert read_root_cause(path) is None


def monitor_workers(*arguments: object) -> None:
    """Log as the function of vLLM's executor does that has this name."""
    logging.getLogger(ENGINE_LOGGERS[1]).error("Worker proc %s died (exit code: %s)", *arguments)


def test_the_exit_code_of_a_worker_is_written_beside(tmp_path: Path) -> None:
    """Only its parent gets it; one that is not known yet is not written."""
    path = tmp_path / "errors"
    stop = watch_root_causes(str(path))
    monitor_workers("VllmWorker-1", None)
    assert read_worker_end(worker_ends(path)) is None
    monitor_workers("VllmWorker-1", -9)
    stop()
    assert read_worker_end(worker_ends(path)) == -9
    assert not path.exists()


@pytest.mark.parametrize("value", [None, str(os.getpid())], ids=["elsewhere", "in the server"])
def test_plugin_does_nothing_outside_engine_processes(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """In another program that uses vLLM, and in the server itself, the plugin has no effect."""
    if value:
        monkeypatch.setenv("LMI_VLLM_SERVER_PID", value)
    group = os.getpgid(0)
    register_plugin()
    assert os.getpgid(0) == group
    assert not any(logging.getLogger(name).filters for name in ENGINE_LOGGERS)


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, for what cannot be undone."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,  # it imports transformers
        check=False,
    )


FORK = """
    import os, socket
    from lmi_vllm.engine.vllm.forks import adopt_forked_engines, new_engine_thread
    adopt_forked_engines()
    adopt_forked_engines()  # once is enough
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    pair = socket.socketpair()

    def families():
        found = set()
        for name in os.listdir("/proc/self/fd"):
            link = f"/proc/self/fd/{{name}}"
            if os.path.exists(link) and "socket:" in os.readlink(link):
                found.add(socket.socket(fileno=os.dup(int(name))).family.name)
        return sorted(found)

    def fork():
        pid = os.fork()
        if pid == 0:
            os.write(1, repr((families(), os.getpgid(0) == os.getpid())).encode())
            os._exit(0)
        os.waitpid(pid, 0)

    {how}
    print("", families())
"""
FORKS = {
    "engine thread": (
        "new_engine_thread().submit(fork).result()",
        "(['AF_UNIX'], True) ['AF_INET', 'AF_UNIX']\n",
    ),
    "any other thread": ("fork()", "(['AF_INET', 'AF_UNIX'], False) ['AF_INET', 'AF_UNIX']\n"),
}


@ON_LINUX
@pytest.mark.parametrize(("how", "shown"), FORKS.values(), ids=FORKS)
def test_forked_engine_holds_none_of_our_sockets(how: str, shown: str) -> None:
    """A fork from the engine thread closes TCP sockets only, in a group of its own."""
    done = run_python(FORK.format(how=how))
    assert (done.stdout, done.stderr) == (shown, "")


@ON_LINUX
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=str)
def test_forked_engine_dies_with_the_server(number: signal.Signals) -> None:
    """However the server ends, the kernel ends what it forked."""
    code = """
        import os, sys, time
        from lmi_vllm.engine.vllm.forks import adopt_forked_engines, new_engine_thread
        adopt_forked_engines()

        def fork():
            pid = os.fork()
            if pid == 0:
                os.write(1, b"child\\n")
                time.sleep(30)
            return pid

        thread = new_engine_thread()  # kept: a fork ends with the thread that made it
        thread.submit(fork).result()
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"child\n", server.wait(10)  # how it ended instead
        server.send_signal(number)
        # The pipe ends only when the child, who inherited it, is gone too.
        assert server.communicate(timeout=10) == (b"", None)


@ON_LINUX
def test_plugin_prepares_a_spawned_process(tmp_path: Path) -> None:
    """A process that vLLM spawned gets a group of its own and records its errors."""
    errors = tmp_path / "errors"
    code = """
        import logging, os
        from lmi_vllm.engine.vllm.processes import ENGINE_LOGGERS, register_plugin
        register_plugin()
        logging.getLogger(ENGINE_LOGGERS[0]).error("it failed", exc_info=ValueError("x"))
        print(os.getpgid(0) == os.getpid())
    """
    pid, file = str(os.getpid()), str(errors)
    done = run_python(code, LMI_VLLM_SERVER_PID=pid, LMI_VLLM_ENGINE_ERROR_FILE=file)
    assert (done.stdout, errors.read_text()) == ("True\n", "ValueError: x\n")
