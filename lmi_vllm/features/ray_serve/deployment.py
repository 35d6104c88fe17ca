"""The deployment: a replica is this server in a child process, and a relay in front of it."""

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from ray import serve
from ray.serve import Application

from lmi_vllm.features.ray_serve.arguments import read_arguments
from lmi_vllm.features.ray_serve.relay import Message, Receive, Relay, Send
from lmi_vllm.features.ray_serve.server_process import ServerProcess

READY_POLL_SECONDS: Final = 0.2
END_SECONDS: Final = 32.0  # the server's own limit is 28 s (DECISIONS 119)
# Beyond these a replica is not given a request: others are, or it waits at Ray's proxy.
MAX_ONGOING_REQUESTS: Final = 256
MAX_QUEUED_REQUESTS: Final = 1000
# Requests that run may end (Ray waits for them), then the server is ended.
GRACEFUL_SHUTDOWN_SECONDS: Final = 120.0
# Adapters that Ray is told a replica has: those that answered last.
MAX_ADAPTERS: Final = 512
_ERRORS_FROM: Final = 400
_OK: Final = 200


class LmiServer:
    """One replica; it is made once its server is ready."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, words: list[str], variables: Mapping[str, str]
    ) -> None:
        self._process = ServerProcess(words, {**os.environ, **variables})
        self._relay = Relay(self._process.socket)
        while (await self._relay.get("/ready"))[0] != _OK:
            self._process.check_runs()
            await asyncio.sleep(READY_POLL_SECONDS)
        self._process.on_end = _end_replica  # before, Ray is told the reason

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application that Ray calls with requests."""

        async def answer(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
            await self._answer(scope, receive, send)

        return answer  # uvicorn takes a method for an application of ASGI 2

    async def check_health(self) -> None:
        """Return unless only another process helps; Ray replaces a replica that fails this.

        A server that sleeps, drains or restarts its engine stays (DECISIONS 127).

        Raises:
            RuntimeError: the server is gone, or its engine has failed for good.
        """
        self._process.check_runs()
        status, body = await self._relay.get("/health")
        if status != _OK:
            raise RuntimeError(f"/health answers {status}: {body.decode(errors='replace')}")

    async def __del__(self) -> None:
        """Drain and end the server; Ray has waited for requests before."""
        await self._relay.close()
        await self._process.end(END_SECONDS)

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (name := serve.get_multiplexed_model_id()):
            send = self._noting(name, send)
        await self._relay(scope, receive, send)

    def _noting(self, name: str, send: Send) -> Send:
        """Return a `send` that lets Ray know of the adapter once it answers with success.

        An id is a client's word, so no other is noted. Ray "loads" one id of a replica at a time
        and keeps one whose load was cancelled for good: nothing may be waited for in there.
        """

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < _ERRORS_FROM:
                await self._have_adapter(name)
            await send(message)

        return send_and_note

    @serve.multiplexed(max_num_models_per_replica=MAX_ADAPTERS)
    async def _have_adapter(self, name: str) -> str:
        """Do nothing: Ray notes that this replica has what it names, and sends others here.

        The server itself loads and evicts. What it has evicted is nearer here than elsewhere.
        """
        return name


LMI_DEPLOYMENT: Final = serve.deployment(
    name="lmi",
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    max_queued_requests=MAX_QUEUED_REQUESTS,
    graceful_shutdown_timeout_s=GRACEFUL_SHUTDOWN_SECONDS,
)(serve.ingress()(LmiServer))


def _end_replica(reason: str) -> None:
    """End the process of a replica whose server has ended: Ray makes another at once."""
    sys.stderr.write(f"{reason}; so the replica ends\n")
    sys.stderr.flush()
    os._exit(1)


def app(arguments: Mapping[str, Any]) -> Application:
    """Return the application that `serve run lmi_vllm.ray:app` deploys.

    `arguments` are the server's variables by their names, and two more: `command` has the words
    after `lmi-vllm serve`, and `gpus` is the number of GPUs of a replica (1; 0: none).

    Raises:
        ValueError: another argument, or a value of the wrong kind.
    """
    read = read_arguments(arguments)
    deployment = LMI_DEPLOYMENT.options(ray_actor_options={"num_cpus": 1, "num_gpus": read.gpus})
    return deployment.bind(read.words, read.variables)
