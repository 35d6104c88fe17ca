"""A plain HTTP client for scenarios: one connection a call, bytes as they came."""

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

PATIENCE: Final = 180.0  # seconds: whole answers of a minute were seen on a busy machine


@dataclass(frozen=True)
class Answer:
    """Status, headers by lower-case name, and the body's bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    def lines(self) -> list[Any]:
        """Return a jsonlines body."""
        return [json.loads(line) for line in self.body.splitlines()]


def connect(url: str, seconds: float = PATIENCE) -> http.client.HTTPConnection:
    """Return a connection to the server of `url`; the certificate of https is not looked at."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=seconds, context=unchecked
        )
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)


def call(
    url: str,
    path: str,
    payload: object = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    seconds: float = PATIENCE,
) -> Answer:
    """Send one request; a payload that is not bytes goes as JSON."""
    connection = connect(url, seconds)
    body = payload if isinstance(payload, (bytes, type(None))) else json.dumps(payload).encode()
    all_headers = {} if body is None else {"Content-Type": "application/json"}
    all_headers |= dict(headers or {})
    verb = method or ("GET" if body is None else "POST")
    try:
        connection.request(verb, path, body, all_headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


class OpenStream:
    """A streamed answer whose first byte has come."""

    def __init__(self, url: str, path: str, payload: object) -> None:
        self._connection = send(url, path, payload)
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            raise AssertionError(self._response.read())
        self._first = self._response.read(1)

    def rest(self) -> bytes:
        """Return all bytes until the server ends the stream, whole or cut, and close."""
        try:
            return self._first + self._response.read()
        except http.client.IncompleteRead as cut:
            return self._first + cut.partial
        finally:
            self.drop()

    def drop(self) -> None:
        """Go away as a killed client does."""
        self._response.close()
        self._connection.close()


def send(url: str, path: str, payload: object) -> http.client.HTTPConnection:
    """Send a request and return the connection without reading the answer."""
    connection = connect(url)
    body = json.dumps(payload).encode()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether `condition` came true within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def running_requests(url: str, headers: Mapping[str, str] | None = None) -> int:
    """Return how many requests vLLM's scheduler holds, running and waiting."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    text = call(url, "/metrics", headers=headers).body.decode()
    return sum(
        int(float(line.rsplit(" ", 1)[1])) for line in text.splitlines() if line.startswith(names)
    )
