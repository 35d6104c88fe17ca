"""A process of the engine's obeys its parent's signals only."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
FORK = """
    import multiprocessing, os, signal, sys, threading
    from multiprocessing import shared_memory
    from lmi_vllm.engine.vllm.forks import adopt_forked_engines, new_engine_thread

    def engine(is_waiting):
        from lmi_vllm.engine.vllm.signals import heed_only_the_parent
        if multiprocessing.get_start_method() == "spawn":
            heed_only_the_parent()
        memory = shared_memory.SharedMemory(create=True, size=8)  # starts Python's tracker
        memory.close()
        memory.unlink()
        signal.signal(signal.SIGTERM, lambda *_: (print("obeyed", flush=True), os._exit(0)))
        print(os.getpid(), flush=True)
        threading.Event().wait()

    def start():
        from lmi_vllm.engine.vllm.signals import block_ending_signals
        block_ending_signals(will_spawn=sys.argv[1] == "spawn")
        process = multiprocessing.Process(target=engine, args=(True,))
        process.start()
        return process

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[1])
        adopt_forked_engines()
        thread = new_engine_thread()
        process = thread.submit(start).result()
        sys.stdin.readline()
        os.kill(process.pid, signal.SIGTERM)
        process.join(10)
        os._exit(0)
"""


@ON_LINUX
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_signal_of_another_process_is_ignored(tmp_path: Path, method: str) -> None:
    """SIGTERM and SIGINT of this process change nothing, the parent's SIGTERM is obeyed at once."""
    script = tmp_path / "server.py"  # a spawned process reads it again
    script.write_text(textwrap.dedent(FORK), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), method],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as server:  # fmt: skip
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert server.stderr is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
            said = f"{number.name} of process {os.getpid()} is ignored: the server ends its engine"
            assert server.stderr.readline().startswith(said)
        out, _ = server.communicate("end it\n", timeout=20)
    assert out == "obeyed\n"
