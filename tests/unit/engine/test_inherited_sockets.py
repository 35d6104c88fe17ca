"""A forked engine holds no socket of the server, and loses none of its own."""

import subprocess
import sys

CHILD = """
import os, socket
from lmi_vllm.engine.vllm.forks import close_internet_sockets

listener = socket.create_server(("127.0.0.1", 0))
address = listener.getsockname()
if os.fork() == 0:
    close_internet_sockets()
    readable, writable = os.pipe()  # what the engine opens for itself
    listener.close()  # as when the object is collected
    os.write(writable, b"x")
    assert os.read(readable, 1) == b"x"
    os._exit(0)
assert os.wait()[1] == 0
listener.close()
socket.create_server(address).close()
"""


def test_collected_sockets_of_the_server_close_nothing_here() -> None:
    """The number of a closed socket is not given to another file while its object is there."""
    subprocess.run([sys.executable, "-c", CHILD], check=True, timeout=60)
