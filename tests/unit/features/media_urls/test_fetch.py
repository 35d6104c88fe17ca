"""URLs inside messages: public addresses only, and never more bytes, seconds or hops than allowed.

The servers are real and on the loopback, so what has to be reached is fetched with
`allows_private`; that this changes nothing else is what the refusals show.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lmi_vllm.features.media_urls.budget import MediaBusyError, MediaRefusedError
from lmi_vllm.features.media_urls.fetch import MAX_LOOKUPS, MediaClient, is_public
from lmi_vllm.messages import MediaPolicy
from lmi_vllm.telemetry.records import RequestRecord, enter_record

fetch_media = MediaClient()
OPEN = MediaPolicy(allows_private=True, max_bytes=1000, seconds=20)
CLOSED = MediaPolicy(max_bytes=1000, seconds=20)
PRIVATE = (
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "100.100.100.200", "192.0.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "::", "::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "::127.0.0.1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:7f00:1::", "2002:a9fe:a9fe::", "2001:db8::1",
    "not an address", "",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_is_public_knows_every_private_form(address: str) -> None:
    """Loopback, private, link-local, metadata, and IPv6 that stands for one of them."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"]
)
def test_is_public_accepts_internet_addresses(address: str) -> None:
    """The check is not simply no."""
    assert is_public(address)


class Site:
    """A web site that counts who came."""

    def __init__(self) -> None:
        self.visits: list[str] = []
        self.is_dripping = asyncio.Event()
        self.may_end = asyncio.Event()
        self.running = self.most_running = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer by path."""
        self.visits.append(request.path)
        answers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "endless": self._endless,
            "drip": self._drip,
            "held": self._held,
        }
        kind = request.match_info["kind"]
        if kind in answers:
            return await answers[kind](request)
        if kind == "redirect":
            return web.Response(status=302, headers={"Location": request.query["to"]})
        if kind == "loop":
            return web.Response(status=302, headers={"Location": "/loop"})
        if kind == "announced":
            return web.Response(body=b"x" * 1001)
        return web.Response(status=404 if kind == "missing" else 200, body=b"image")

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 400)

    async def _held(self, _: web.Request) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await self.may_end.wait()
        self.running -= 1
        return web.Response(body=b"x" * 900)

    async def _drip(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            self.is_dripping.set()
            await asyncio.sleep(0.05)


@pytest.fixture
async def site() -> AsyncIterator[tuple[str, Site]]:
    """Return the URL of a running site, and the site."""
    behind = Site()
    app = web.Application()
    app.router.add_get("/{kind}", behind.answer)
    async with TestServer(app, skip_url_asserts=True) as server:
        yield f"http://127.0.0.1:{server.port}", behind


async def test_fetch_media_returns_the_bytes(site: tuple[str, Site]) -> None:
    """The good case, a redirect on the way included."""
    url, _ = site
    assert await fetch_media(f"{url}/image", OPEN) == b"image"
    assert await fetch_media(f"{url}/redirect?to=/image", OPEN) == b"image"


HOSTS = (
    "127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001", "0177.0.0.1",
    "127.1", "0",
)  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
async def test_fetch_media_connects_to_no_private_address(
    host: str, site: tuple[str, Site]
) -> None:
    """Whatever the host is written as, nothing arrives at the site; old forms are no URL at all."""
    url, behind = site
    port = url.rpartition(":")[2]
    with pytest.raises(MediaRefusedError, match=r"not lead to a public address|URL is not valid"):
        await fetch_media(f"http://{host}:{port}/image", CLOSED)
    assert behind.visits == []


async def test_fetch_media_says_the_same_of_closed_ports() -> None:
    """A refused address cannot be told from a closed port."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(MediaRefusedError, match="does not lead to a public address"):
            await fetch_media(f"http://127.0.0.1:{unused.getsockname()[1]}/", CLOSED)


REFUSED = {
    "endless": ("/endless", "larger than 1000 bytes"),
    "announced": ("/announced", "larger than 1000 bytes"),
    "loop": ("/loop", "redirects more than 5 times"),
    "missing": ("/missing", "answered 404"),
    "redirect to a file": ("/redirect?to=file:///etc/passwd", "must be an http, https or data"),
    "redirect to gopher": ("/redirect?to=gopher://127.0.0.1/", "must be an http, https or data"),
    "redirect to an invalid URL": ("/redirect?to=http://[", "cannot be fetched"),
}


@pytest.mark.parametrize(("path", "said"), REFUSED.values(), ids=REFUSED)
async def test_fetch_media_bounds(path: str, said: str, site: tuple[str, Site]) -> None:
    """Bytes, hops and schemes are bounded, and the text says which."""
    with pytest.raises(MediaRefusedError, match=said):
        await fetch_media(site[0] + path, OPEN)


async def test_fetch_media_bounds_seconds(site: tuple[str, Site]) -> None:
    """A body that drips is never silent for long; the time for all of it ends it."""
    url, behind = site
    with pytest.raises(MediaRefusedError, match="within LMI_MEDIA_TIMEOUT"):
        await fetch_media(f"{url}/drip", MediaPolicy(allows_private=True, seconds=0.5))
    assert behind.is_dripping.is_set()


async def test_fetch_media_holds_redirects_to_allowed_domains(site: tuple[str, Site]) -> None:
    """A domain that is allowed cannot lead to one that is not."""
    url, behind = site
    elsewhere = url.replace("127.0.0.1", "localhost")
    assert await fetch_media(f"{url}/image", OPEN, ["127.0.0.1"]) == b"image"
    with pytest.raises(MediaRefusedError, match="allowed_media_domains"):
        await fetch_media(f"{url}/redirect?to={elsewhere}/image", OPEN, ["127.0.0.1"])
    assert behind.visits == ["/image", "/redirect"]


async def test_fetch_media_uses_no_proxy_of_the_environment(
    site: tuple[str, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would connect for us, unchecked."""
    url, behind = site
    monkeypatch.setenv("http_proxy", url)
    with pytest.raises(MediaRefusedError):
        await fetch_media("http://169.254.169.254/latest/meta-data", CLOSED)
    assert behind.visits == []


async def test_names_that_hang_hold_up_no_other_work(site: tuple[str, Site]) -> None:
    """A client's name server that never answers costs that client, and no thread of the loop."""
    url, _ = site
    answers, asked = threading.Event(), list[str]()

    def look_up(host: str, *given: Any, **how: Any) -> Any:
        if host == "hangs.example":
            asked.append(host)
            answers.wait()
        return socket.getaddrinfo("127.0.0.1", *given, **how)

    fetch = MediaClient(look_up)

    async def fetched(client: str, address: str) -> bytes:
        enter_record(RequestRecord("id", "POST", "/", "/", client, "lmi"))
        return await fetch(address, OPEN)

    slow = f"{url.replace('127.0.0.1', 'hangs.example')}/image"
    hanging = [asyncio.create_task(fetched("192.0.2.1", slow)) for _ in range(5 * MAX_LOOKUPS)]
    try:
        while len(asked) < MAX_LOOKUPS:  # noqa: ASYNC110 (threads ask)
            await asyncio.sleep(0)
        fast = f"{url.replace('127.0.0.1', 'fast.example')}/image"
        assert await asyncio.create_task(fetched("192.0.2.2", fast)) == b"image"
        assert await asyncio.wait_for(asyncio.to_thread(str, 1), 10) == "1"
        assert len(asked) == MAX_LOOKUPS
    finally:
        answers.set()
    assert set(await asyncio.gather(*hanging)) == {b"image"}


def request(client: str) -> RequestRecord:
    """Make a request of `client` the current one."""
    record = RequestRecord("id", "POST", "/", "/", client, "lmi")
    enter_record(record)
    return record


async def test_urls_of_a_request_are_few_at_a_time_and_bounded_together(
    site: tuple[str, Site],
) -> None:
    """40 URLs in 3 KiB were 40 files at once; four are fetched, and have four times one's bytes."""
    url, behind = site
    request("192.0.2.1")
    fetch = MediaClient()
    tasks = [asyncio.create_task(fetch(f"{url}/held", OPEN)) for _ in range(40)]
    while behind.running < 4:  # noqa: ASYNC110 (fetches come)
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)  # a fifth would have come
    behind.may_end.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert behind.most_running == 4
    assert [len(one) for one in found if isinstance(one, bytes)] == [900] * 4
    assert {str(one) for one in found if not isinstance(one, bytes)} == {
        "the media that URLs of the request lead to have more than 4000 bytes, 4 times "
        "LMI_MEDIA_MAX_SIZE"
    }


async def test_fetched_media_of_all_requests_are_bounded(site: tuple[str, Site]) -> None:
    """Who holds more than an even part is refused; another is served; an end frees what it held."""
    url, behind = site
    behind.may_end.set()
    fetch, records = MediaClient(), list[RequestRecord]()

    async def fetched(client: str) -> bytes:
        records.append(request(client))
        return await fetch(f"{url}/held", OPEN)

    for _ in range(17):
        await asyncio.create_task(fetched("192.0.2.1"))
    with pytest.raises(MediaBusyError, match="as much fetched media as it may"):
        await asyncio.create_task(fetched("192.0.2.1"))
    await asyncio.create_task(fetched("192.0.2.2"))
    for record in records:
        record.end(200)
    await asyncio.create_task(fetched("192.0.2.1"))


async def test_failed_fetches_are_not_counted(site: tuple[str, Site]) -> None:
    """What was not kept is not held."""
    record = request("192.0.2.1")
    fetch = MediaClient()
    for _ in range(5):
        with pytest.raises(MediaRefusedError, match="larger than 1000 bytes"):
            await fetch(f"{site[0]}/endless", OPEN)
    assert await fetch(f"{site[0]}/image", OPEN) == b"image"
    record.background().end(200)  # an answer that goes on has what it holds
    assert not record.at_end
