"""The first process's handle of another one: how it sees its end."""

import asyncio
import os
import socket
import sys
from typing import Any, cast

import pytest

from lmi_vllm.features.front_ends.first import FirstProcess
from lmi_vllm.features.front_ends.handle import FrontEnd
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several front ends are Linux only")


async def test_end_is_seen_although_another_process_has_the_channel() -> None:
    """An engine that is forked while a front end begins inherits both ends of its channel."""
    inherited: list[int] = []

    async def start(end: socket.socket, _: asyncio.Event) -> asyncio.subprocess.Process:
        inherited.append(os.dup(end.fileno()))
        return await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")

    service = InferenceService(RequestQueue(Lifecycle()))
    process = FrontEnd(FirstProcess(service), 1, cast("Any", start))
    try:
        await asyncio.wait_for(process.run(cast("Any", "setup")), 30)
    finally:
        os.close(inherited[0])
    assert process.ending == "code 7"
