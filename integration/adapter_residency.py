"""One slot and several adapters: what llm-d's router makes of each scrape, and of cache events.

The rules of its extractor read a running server: idle, busy, with an adapter in the slot, evicted,
back and pinned. A subscriber of the events sees the names of requests through all of that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.adapters_support import SINGLE_THREAD, write_weights
from integration.client import OpenStream, call, send, wait_until
from integration.conftest import start_server
from integration.fleet.proxies import free_ports
from integration.llm_d import Endpoint, extracted
from integration.llm_d_events import Events, published_at

pytestmark = pytest.mark.vllm

READ_SECONDS = 30.0
PROMPT = "The capital of France is"
LONG = "The sea is wide and the wind is cold. " * 40  # of more than one block
NAMES = ("fr", "de", "it")


@dataclass(frozen=True)
class Server:
    """A server with one slot, two places in main memory, and adapters of these folders."""

    url: str
    folders: dict[str, Path]
    events: Events

    def ask(self, name: str, prompt: str = PROMPT) -> str:
        """Return an adapter's answer."""
        body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = call(self.url, "/v1/completions", body)
        assert answer.status == 200, answer.body
        return str(answer.json()["choices"][0]["text"])

    def register(self, name: str, folder: Path, more: str = "") -> None:
        """Register an adapter, and load it."""
        answer = call(self.url, f"/adapters?name={name}&src={folder}{more}", method="POST")
        assert answer.status == 200, answer.body

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        assert call(self.url, f"/adapters/{name}", method="DELETE").status == 200

    def seen(self) -> Endpoint:
        """What the router knows after a scrape."""
        return extracted(call(self.url, "/metrics").body.decode())

    def shows(self, **expected: tuple[str, bool]) -> None:
        """Wait until the router knows that the workers hold just these."""
        assert wait_until(lambda: self.seen().loaded == expected, READ_SECONDS), self.seen()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start it, without the adapters of the embedded model."""
    folder = tmp_path_factory.mktemp("residency")
    (port,) = free_ports(1)
    environ = {**SINGLE_THREAD, **published_at(port)}
    words = ("--demo", "--max-loras", "1", "--max-cpu-loras", "2", "--port", "0")
    process = start_server(folder, *words, environ=environ, is_forked=True)
    try:
        url = process.url_when_ready()
        folders = {name: write_weights(folder / name, at) for at, name in enumerate(NAMES)}
        events = Events(port)
        found = Server(url, folders, events)
        for name in ("capitals", "json"):
            found.remove(name)
        for name in NAMES:
            found.register(name, folders[name])
        yield found
        events.close()
    finally:
        process.kill()


def test_every_adapter_of_a_scrape_is_a_model_that_requests_name(server: Server) -> None:
    """Of an idle server; requests for the base model are none of an adapter."""
    server.ask("fr")
    cards = {card["id"]: card for card in call(server.url, "/v1/models").json()["data"]}
    assert wait_until(lambda: server.seen().active == {"fr"}, READ_SECONDS)
    seen = server.seen()
    assert (seen.waiting, seen.running, seen.cache_use) == (0, 0, 0)
    assert min(seen.block_size, seen.blocks) > 0
    assert seen.slots == seen.with_slot == 1
    assert cards[seen.base_model]["parent"] is None
    assert seen.loaded
    assert {cards[name]["parent"] for name in seen.loaded} == {seen.base_model}


def test_evicted_adapter_is_found_again(server: Server) -> None:
    """The router sends its requests elsewhere while it is not there; its answers are the same."""
    first = {name: server.ask(name) for name in ("it", "fr")}
    server.shows(fr=("gpu", False), it=("cpu", False))
    seen = server.seen()
    assert (seen.affinity("fr"), seen.affinity("it"), seen.affinity("de")) == (1, 0, 0)
    server.ask("de")
    server.shows(de=("gpu", False), fr=("cpu", False))
    assert server.ask("it") == first["it"]
    server.shows(it=("gpu", False), de=("cpu", False))
    assert (server.seen().affinity("it"), server.seen().affinity("fr")) == (1, 0)
    assert server.ask("fr") == first["fr"]
    server.shows(fr=("gpu", False), it=("cpu", False))


def test_busy_server_has_an_adapter_that_waits(server: Server) -> None:
    """Its only slot is taken until the other's request ends."""
    body: dict[str, Any] = {"prompt": PROMPT, "stream": True, "ignore_eos": True}
    running = OpenStream(server.url, "/v1/completions", {**body, "model": "fr", "max_tokens": 1500})
    waiting = send(server.url, "/v1/completions", {**body, "model": "de", "max_tokens": 1})

    def is_busy() -> bool:
        seen = server.seen()
        counts = (seen.running, seen.waiting, seen.active, seen.awaited)
        return counts == (1, 1, {"fr"}, {"de"}) and seen.cache_use > 0

    try:
        assert wait_until(is_busy, READ_SECONDS), server.seen()
        assert server.seen().affinity("de") == 0.6
    finally:
        running.drop()
    assert waiting.getresponse().read().endswith(b"[DONE]\n\n")
    waiting.close()
    assert wait_until(lambda: server.seen().active == {"de"}, READ_SECONDS), server.seen()
    assert (server.seen().waiting, server.seen().awaited) == (0, frozenset())


def test_pinned_adapter_keeps_its_slot(server: Server) -> None:
    """The router sees the pin, and that others have no place until it is gone."""
    server.register("kept", server.folders["it"], "&pin=true")
    try:
        assert wait_until(lambda: "kept" in (server.seen().loaded or ()), READ_SECONDS)
        seen = server.seen()
        assert seen.loaded is not None
        assert seen.loaded["kept"] == ("gpu", True)
        assert (seen.affinity("kept"), seen.affinity("fr")) == (1, 0)
        assert call(server.url, "/invocations", {"inputs": PROMPT, "adapters": "fr"}).status == 424
    finally:
        server.remove("kept")
    server.ask("fr")
    assert wait_until(lambda: server.seen().active == {"fr"}, READ_SECONDS)
    assert "kept" not in (server.seen().loaded or ())


def test_events_have_the_names_of_requests_after_eviction_and_reload(server: Server) -> None:
    """Blocks outlive the eviction of their adapter, and not its registration."""
    events = server.events
    events.start(lambda: server.ask("lmi", events.fresh(LONG)))
    server.ask("fr", LONG)
    server.ask("de", LONG)
    server.ask("it", LONG)  # fr has no place any more
    server.ask("fr", LONG)  # and is back: its blocks are there
    server.ask("fr", events.fresh(LONG))
    server.remove("fr")
    server.register("fr", server.folders["it"])
    server.ask("fr", LONG)
    found = [events.stored() for _ in range(5)]
    assert [name for name, _ in found] == ["fr", "de", "it", "fr", "fr"]
    assert all(hashes for _, hashes in found)
    assert len(frozenset().union(*(hashes for _, hashes in found))) == sum(
        len(hashes) for _, hashes in found
    )
