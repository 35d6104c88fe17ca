"""The server of a replica: a child on a Unix socket, which ends with the replica."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.private_folders import new_private_folder

KILL_SECONDS: Final = 5.0  # for a killed process to be gone
READ_SECONDS: Final = 1.0
_REASON: Final = b"lmi-vllm: error: "
_NO_REASON: Final = "it gave no reason"


class ServerEndedError(RuntimeError):
    """The server ended before it was asked to."""


class ServerProcess:
    """`lmi-vllm serve` with these words and variables; both streams go to those of this process.

    `on_end` is called in a thread, with the reason, if the server ends without `end`.
    """

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        # The path of a socket has 107 bytes at most, so TMPDIR does not count. What replicas that
        # were killed have left is removed here.
        self._folder = new_private_folder("lmi-ray-", Path("/tmp"))
        self.socket = str(self._folder.path / "server.sock")
        self.on_end: Callable[[str], None] | None = None
        self._is_ending = False
        self._reason = ""
        self._process = subprocess.Popen(
            [
                sys.executable, "-P", "-m", "lmi_vllm.features.ray_serve.child", str(os.getpid()),
                *words, "--uds", self.socket,  # beside any other address it is the one that counts
            ],
            env=environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C and Ray's signals to its group are not for the server
        )  # fmt: skip
        self._follower = threading.Thread(target=self._follow, name="lmi-server", daemon=True)
        self._follower.start()

    def check_runs(self) -> None:
        """Return while the server's process is there.

        Raises:
            ServerEndedError: it has ended.
        """
        if self._process.poll() is not None:
            self._follower.join(READ_SECONDS)  # the reason may not have been read
            raise ServerEndedError(self._describe_end())

    async def end(self, seconds: float) -> None:
        """Let the server drain and end; it is killed after `seconds`."""
        self._is_ending = True
        self._process.send_signal(signal.SIGTERM)
        if not await self._is_gone_within(seconds):
            self._process.kill()
            await self._is_gone_within(KILL_SECONDS)
        await asyncio.to_thread(self._follower.join, READ_SECONDS)

    async def _is_gone_within(self, seconds: float) -> bool:
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _follow(self) -> None:
        """Pass the server's lines on until it has ended; Ray shows the reason of an end."""
        stderr = self._process.stderr
        if stderr is None:
            raise RuntimeError("stderr is a pipe")
        with stderr:
            for line in stderr:
                if line.startswith(_REASON):
                    self._reason = line.removeprefix(_REASON).decode(errors="replace").strip()
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
        self._process.wait()
        self._folder.remove()
        if self.on_end is not None and not self._is_ending:
            self.on_end(self._describe_end())

    def _describe_end(self) -> str:
        reason = self._reason or _NO_REASON
        return f"the server of this replica ended with code {self._process.returncode}: {reason}"
