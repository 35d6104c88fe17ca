"""A ready server's garbage collector does not look through what vLLM imported: 0.4 s for each."""

import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import unused_port

# A thread beside the server says what the collector would look through, then ends the process.
PROGRAM = """
import gc, os, signal, sys, threading, time, urllib.request
from lmi_vllm.cli import main

def report():
    port = int(sys.argv[1])
    while True:
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/ping").status == 200:
                break
        except OSError:
            time.sleep(0.2)
    print("FROZEN", gc.get_freeze_count(), len(gc.get_objects()), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=report, daemon=True).start()
main(["serve", "--demo", "--port", sys.argv[1]])
"""


@pytest.mark.vllm
def test_what_was_imported_is_frozen(tmp_path: Path) -> None:
    """Almost everything is out of the collector's sight once the model is ready."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    command = [sys.executable, "-c", PROGRAM, str(unused_port())]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    (line,) = [row for row in ended.stderr.splitlines() if row.startswith("FROZEN")]
    frozen, seen = map(int, line.split()[1:])
    assert frozen > 300_000
    assert seen < frozen / 10
