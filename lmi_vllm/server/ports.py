"""One open port: its socket, its connections, and its application."""

import asyncio
import errno
import os
import socket
import ssl
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from lmi_vllm.clock import CONNECTION_CLOSE_SECONDS
from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.errors import StartupError
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.app import create_app
from lmi_vllm.web.connection import (
    TLS_HANDSHAKE_SECONDS,
    ClientConnection,
    ClientTimeouts,
)
from lmi_vllm.web.request import WebOptions

BACKLOG: Final = 2048
ANY_ADDRESS: Final = "::"


class _Site(web.BaseSite):
    """A listener whose connections are ours; aiohttp's sites make aiohttp's."""

    def __init__(
        self,
        runner: web.AppRunner,
        address: ListenAddress,
        tls: ssl.SSLContext | None,
        timeouts: ClientTimeouts,
        *,
        reuse_port: bool = False,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._address = address
        self._reuse_port = reuse_port
        self._timeouts = timeouts
        self._socket_file = 0

    @property
    def name(self) -> str:
        """The address as configured."""
        return self._address.url()

    async def end(self) -> None:
        """End the whole application."""
        await self._runner.cleanup()

    async def stop(self) -> None:
        """Close the port; the file of a Unix socket goes with it, unless it is another's by now."""
        await super().stop()
        if self._socket_file:
            _remove_file(self._address.path, self._socket_file)
        self._socket_file = 0

    async def start(self) -> None:
        """Open the port."""
        await super().start()
        loop = asyncio.get_running_loop()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner is not set up")
        connection = partial(ClientConnection, server, self._timeouts, loop=loop, access_log=None)
        if self._address.path:
            _check_nothing_answers(self._address.path)
            self._server = await loop.create_unix_server(
                connection, self._address.path, backlog=self._backlog
            )
            self._socket_file = _file_number(self._address.path)
            return
        tls: dict[str, Any] = {
            "ssl": self._ssl_context,
            "ssl_handshake_timeout": TLS_HANDSHAKE_SECONDS if self._ssl_context else None,
            "backlog": self._backlog,
        }
        if self._address.host == ANY_ADDRESS and socket.has_dualstack_ipv6():
            # As vLLM: `::` is IPv4, too. An event loop would make it IPv6 alone.
            both = socket.create_server(
                (ANY_ADDRESS, self._address.port),
                family=socket.AF_INET6,
                backlog=self._backlog,
                reuse_port=self._reuse_port,
                dualstack_ipv6=True,
            )
            self._server = await loop.create_server(connection, sock=both, **tls)
            return
        self._server = await loop.create_server(
            connection,
            self._address.host,
            self._address.port,
            reuse_port=self._reuse_port,
            **tls,
        )


async def open_port(
    address: ListenAddress,
    service: InferenceService,
    options: WebOptions,
    tls: ssl.SSLContext | None,
    inner_socket: str = "",
    *,
    is_shared: bool = False,
) -> tuple[web.AppRunner, ListenAddress]:
    """Return the running application of one listener and its address; the port is bound.

    With `is_shared` another process of the server has the port, and has allowed sharing by
    `inner_socket`.

    Raises:
        StartupError: the address is taken, or cannot be shared.
    """
    runner = await _set_up(service, options, inner_socket)
    tls = tls if address.is_tls else None
    if inner_socket:
        # Two servers that share their ports would share them with each other, without an error.
        await _check_free(address)
        inner = ListenAddress("unix", path=inner_socket)
        await _listen(_Site(runner, inner, None, options.timeouts))
    reuse_port = is_shared or bool(inner_socket)
    await _listen(_Site(runner, address, tls, options.timeouts, reuse_port=reuse_port))
    if not address.path:  # port 0 means any free one
        address = replace(address, port=runner.addresses[-1][1])
    return runner, address


async def _set_up(
    service: InferenceService, options: WebOptions, inner_socket: str
) -> web.AppRunner:
    app = create_app(service, options)
    without_prefix = options.prefix(app, inner_socket) if options.prefix else None
    # A client that disconnects cancels its handler, and with it the engine's work.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=CONNECTION_CLOSE_SECONDS,
    )
    await runner.setup()
    if without_prefix and (server := runner.server) is not None:
        server.request_factory = without_prefix(server.request_factory)
    return runner


async def _listen(site: _Site) -> None:
    try:
        await site.start()
    except OSError as error:
        await site.end()
        raise _cannot_listen(site.name, error) from error


async def _check_free(address: ListenAddress) -> None:
    """Raise StartupError when the address is taken."""
    try:
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, address.host, address.port
        )
    except OSError as error:
        raise _cannot_listen(address.url(), error) from error
    server.close()
    await server.wait_closed()


def _file_number(path: str) -> int:
    """Return the inode of a file; 0 if there is none."""
    try:
        return Path(path).stat().st_ino
    except FileNotFoundError:
        return 0


def _remove_file(path: str, number: int) -> None:
    """Remove a file, if it still is the one with that inode."""
    if _file_number(path) == number:
        Path(path).unlink(missing_ok=True)


def _check_nothing_answers(path: str) -> None:
    """Raise OSError when a server has the socket file `path`: the event loop would replace it.

    One that nothing answers on is left from a server that was killed.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            pass  # a server that is too busy to accept is there, too
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _cannot_listen(url: str, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {url}: {error.strerror or error}")
