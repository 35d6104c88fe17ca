"""Clients that name adapters by Zipf's law, compare each answer, and time the first token."""

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from integration.client import connect, wait_until
from integration.fleet.proxies import SECONDS, SERVER_HEADER

PROMPT: Final = "The capital of France is"
TOKENS: Final = 8
# Adapters that end their answers at once would answer alike: with nothing.
DISTINCT: Final = {"temperature": 0, "ignore_eos": True}


class RefusedError(Exception):
    """An answer that is no 200."""


class CutError(Exception):
    """A stream that ended behind its first byte without its end: no proxy can repeat it."""


@dataclass(frozen=True)
class Told:
    """One answer: which server gave it, what it says, and the time to its first token."""

    server: str
    models: frozenset[str]
    text: str
    first_seconds: float


def ask(url: str, name: str, *, is_streamed: bool = False, tokens: int = TOKENS) -> Told:
    """Return the answer of an adapter.

    Raises:
        RefusedError, CutError, OSError, HTTPException: it did not come whole.
    """
    body = {"prompt": PROMPT, "model": name, "max_tokens": tokens, **DISTINCT}
    connection, began = connect(url, SECONDS + 10), time.monotonic()
    try:
        sent = json.dumps({**body, "stream": is_streamed})
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        server = response.getheader(SERVER_HEADER) or url
        if response.status != http.client.OK:
            raise RefusedError(f"{response.status} of {server}: {response.read()[:300]!r}")
        if is_streamed:
            return _stream(response, server, began)
        answer = json.loads(response.read())
        return Told(server, frozenset({answer["model"]}), _text(answer), time.monotonic() - began)
    finally:
        connection.close()


def _stream(response: http.client.HTTPResponse, server: str, began: float) -> Told:
    first, texts, models = 0.0, [], set()
    try:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            first = first or time.monotonic() - began
            if line.startswith(b"data: [DONE]"):
                return Told(server, frozenset(models), "".join(texts), first)
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RefusedError(f"in a stream of {server}: {event['error']}")
            models.add(event["model"])
            texts.append(_text(event))
    except (OSError, http.client.HTTPException) as error:
        raise CutError(repr(error)) from error
    raise CutError("no end")


def _text(answer: dict[str, Any]) -> str:
    """Return the text; the scripted engine has none."""
    return "".join(choice["text"] for choice in answer.get("choices", ()))


@dataclass
class Load:
    """The clients, and what became of their requests.

    `answers` are those of each adapter when it is asked alone; without them the names are compared,
    which the scripted engine repeats.
    """

    url: str
    names: Sequence[str]  # the most asked for first
    answers: Mapping[str, str] = field(default_factory=dict)
    clients: int = 4
    streamed: float = 0.0  # the part of all requests
    answered: int = 0
    streams: int = 0
    lost: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    crossed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    first_tokens: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm": []})
    _served: dict[tuple[str, str], float] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask while the body runs."""
        threads = [threading.Thread(target=self._ask, args=(at,)) for at in range(self.clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def wait_for(self, more: int, seconds: float = 240) -> None:
        """Return when so many more have been answered."""
        goal = self.answered + more
        if not wait_until(lambda: self.answered + len(self.lost) >= goal, seconds):
            raise TimeoutError(f"not {more} answers in {seconds} s; lost: {self.lost[:3]}")

    def ask_also(self, name: str) -> None:
        """Ask for this adapter, too, and more often than for any other."""
        self.names = (name, *self.names)

    def forget(self, server: str) -> None:
        """Record that a server has restarted: it has no adapter."""
        with self._turn:
            self._served = {key: at for key, at in self._served.items() if key[0] != server}

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._over.is_set():
            names = self.names
            (name,) = draw.choices(names, [1 / (rank + 1) for rank in range(len(names))])
            is_streamed, began = draw.random() < self.streamed, time.monotonic()
            try:
                told = ask(self.url, name, is_streamed=is_streamed)
            except CutError as error:
                self.cut.append(f"{name}: {error}")
            except Exception as error:  # noqa: BLE001 (whatever it is, the answer is lost)
                self.lost.append(f"{name}: {error!r}")
            else:
                self._take(name, told, began, is_streamed)

    def _take(self, name: str, told: Told, began: float, is_streamed: bool) -> None:
        with self._turn:
            self.answered += 1
            self.streams += is_streamed
            since = self._served.setdefault((told.server, name), time.monotonic())
            if is_streamed:
                self.first_tokens["warm" if since < began else "cold"].append(told.first_seconds)
            self.compare(name, told)

    def compare(self, name: str, told: Told) -> None:
        """Take note of an answer that is not the adapter's own."""
        expected = self.answers.get(name)
        if told.models != {name}:
            self.crossed.append(f"{name}: {told}")
        elif expected is not None and told.text != expected:
            others = [other for other, text in self.answers.items() if text == told.text]
            (self.crossed if others else self.different).append(f"{name}: {told} {others[:2]}")
