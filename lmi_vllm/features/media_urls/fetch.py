"""The client for URLs inside messages: it connects to public addresses only (no SSRF).

The check is made when a socket is opened, on the very address that is connected to: no other form
of the host, DNS rebinding or redirect can pass it.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from lmi_vllm.features.media_urls.budget import FetchBudget, Held, MediaRefusedError
from lmi_vllm.messages import MediaPolicy
from lmi_vllm.telemetry.records import current_record

MAX_REDIRECTS: Final = 5
CHUNK_BYTES: Final = 64 << 10
MAX_LOOKUPS: Final = 8  # names of one client that are looked up at a time
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_FIRST_ERROR: Final = 400
_SCOPE: Final = 3  # where an address of IPv6 has the number of its link
# Azure answers for its machines at a public address; the other clouds' are link-local or private.
_CLOUD_ADDRESSES: Final = frozenset({ipaddress.ip_address("168.63.129.16")})
# DNS64 gives addresses here for hosts that have IPv4 only (RFC 6052); the last four bytes count.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: str) -> bool:
    """Whether the address belongs to the public internet, in whatever form it is written."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if parsed in _NAT64:
        return _is_public(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))
    if isinstance(parsed, ipaddress.IPv6Address):
        carried = (parsed.ipv4_mapped, parsed.sixtofour, *(parsed.teredo or ()))
        if any(each is not None and not _is_public(each) for each in carried):
            return False
    return _is_public(parsed)


def _is_public(address: IPAddress) -> bool:
    is_special = address.is_multicast or address.is_reserved or address.is_unspecified
    is_old_private = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    is_known = address in _CLOUD_ADDRESSES or is_special or is_old_private
    return address.is_global and not is_known


class _Names(AbstractResolver):
    """Looks names up, each client's in threads of its own.

    A look-up cannot be ended, and a name server that does not answer takes it half a minute. The
    threads that the event loop shares are for everything else.
    """

    def __init__(self, look_up: Callable[..., Any]) -> None:
        self._look_up = look_up
        self._threads: dict[str, ThreadPoolExecutor] = {}  # by client
        self._running: dict[str, set[Future[Any]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host."""
        record = current_record()
        client = "" if record is None else record.source
        self._forget_ended()
        if client not in self._threads:
            self._threads[client] = ThreadPoolExecutor(MAX_LOOKUPS, "media-name")
            self._running[client] = set()
        how = {"family": family, "type": socket.SOCK_STREAM, "flags": socket.AI_ADDRCONFIG}
        looking = self._threads[client].submit(self._look_up, host, port, **how)
        self._running[client].add(looking)
        return [
            ResolveResult(
                hostname=host,
                host=_numeric(address),
                port=address[1],
                family=found,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found, _, protocol, _, address in await asyncio.wrap_future(looking)
        ]

    def _forget_ended(self) -> None:
        for client, looking in tuple(self._running.items()):
            if all(one.done() for one in looking):
                del self._running[client]
                self._threads.pop(client).shutdown(wait=False)

    async def close(self) -> None:
        """Nothing: it is for every fetch."""


def _numeric(address: Any) -> str:
    """Return an address of getaddrinfo as text, a link's scope included."""
    host, scope = str(address[0]), address[3] if len(address) > _SCOPE else 0
    return f"{host}%{scope}" if scope and "%" not in host else host


class MediaClient:
    """Fetches what URLs inside messages name; a server has one."""

    def __init__(self, look_up: Callable[..., Any] = socket.getaddrinfo) -> None:
        self._names = _Names(look_up)
        self._budget = FetchBudget()

    async def __call__(
        self,
        url: str,
        policy: MediaPolicy,
        domains: Collection[str] = (),
        *,
        silence_seconds: float | None = None,
        max_bytes: int | None = None,
        follows_redirects: bool = True,
    ) -> bytes:
        """Return the bytes at `url`, within the policy's size and time, redirects included.

        `domains` are the only hosts allowed, where there are any; each redirect is held to them.

        Raises:
            MediaRefusedError: the URL is not allowed, the media too large or late, or the fetch
                failed.
            MediaBusyError: the server holds as much fetched media as it may.
        """
        limit = min(policy.max_bytes, max_bytes or policy.max_bytes)
        hops = MAX_REDIRECTS if follows_redirects else 0
        async with self._budget.fetch(policy.max_bytes) as held:
            content = _Content(limit, self._budget, held)
            try:
                await self._fetch(url, policy, domains, hops, content, silence_seconds)
            except BaseException:
                held.size -= len(content.bytes)
                raise
            return bytes(content.bytes)

    async def _fetch(
        self,
        url: str,
        policy: MediaPolicy,
        domains: Collection[str],
        hops: int,
        content: "_Content",
        silence_seconds: float | None,
    ) -> None:
        guard = _Guard(policy, self._names)
        try:
            async with asyncio.timeout(policy.seconds), guard.session(silence_seconds) as session:
                await _follow(session, url, domains, hops, content)
        except TimeoutError as error:
            raise MediaRefusedError(
                f"the media did not arrive within LMI_MEDIA_TIMEOUT ({policy.seconds:g} s)"
            ) from error
        except aiohttp.InvalidURL as error:
            raise MediaRefusedError("the media URL is not valid") from error
        except (aiohttp.ClientError, OSError, UnicodeError, ValueError) as error:
            if guard.has_refused:
                raise MediaRefusedError(
                    "the media URL does not lead to a public address; "
                    "LMI_MEDIA_ALLOW_PRIVATE=true on the server allows others"
                ) from error
            raise MediaRefusedError("the media URL cannot be fetched") from error


class _Guard:
    """Makes the client of one fetch, for public addresses unless the policy allows all."""

    def __init__(self, policy: MediaPolicy, names: AbstractResolver) -> None:
        self._allows_private = policy.allows_private
        self._names = names
        self.has_refused = False

    def session(self, silence_seconds: float | None) -> aiohttp.ClientSession:
        """Return a client that connects through `open_socket` alone and keeps no cookies."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=self._names, socket_factory=self.open_socket),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=silence_seconds, sock_read=silence_seconds
            ),
            # A proxy of the environment would do the connecting, where no address can be checked.
            trust_env=self._allows_private,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def open_socket(self, info: Any) -> socket.socket:
        """Return a socket for one address of getaddrinfo.

        Raises:
            PermissionError: the address is not public.
        """
        family, kind, protocol, _, address = info
        if not self._allows_private and not is_public(str(address[0])):
            self.has_refused = True
            raise PermissionError("not a public address")
        return socket.socket(family, kind, protocol)


@dataclass(slots=True)
class _Content:
    """The bytes of one fetch, counted as they come."""

    limit: int
    budget: FetchBudget
    held: Held
    bytes: bytearray = field(default_factory=bytearray)

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Take the whole answer.

        Raises:
            MediaRefusedError: it, or all of the request, is too large.
            MediaBusyError: the server holds as much fetched media as it may.
        """
        if (response.content_length or 0) <= self.limit:
            async for piece in response.content.iter_chunked(CHUNK_BYTES):
                if len(self.bytes) + len(piece) > self.limit:
                    break
                self.budget.add(self.held, len(piece))
                self.bytes += piece
            else:
                return
        raise MediaRefusedError(
            f"the media is larger than {self.limit} bytes (LMI_MEDIA_MAX_SIZE, or vLLM's for its "
            "kind)"
        )


async def _follow(
    session: aiohttp.ClientSession,
    url: str,
    domains: Collection[str],
    hops: int,
    content: _Content,
) -> None:
    for _ in range(hops + 1):
        _check_url(url, domains)
        async with session.get(url, allow_redirects=False) as response:
            target = response.headers.get("Location")
            if response.status in _REDIRECTS and target:
                url = urljoin(url, target)
                continue
            if response.status >= _FIRST_ERROR:
                raise MediaRefusedError(f"the media's server answered {response.status}")
            return await content.read(response)
    raise MediaRefusedError(f"the media URL redirects more than {hops} times")


def _check_url(url: str, domains: Collection[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https"):
        raise MediaRefusedError("the media URL must be an http, https or data URL")
    if domains and parts.hostname not in domains:
        raise MediaRefusedError("the media URL is not of an allowed domain (allowed_media_domains)")
