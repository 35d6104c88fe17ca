"""Milliseconds to the first token of streams one after another, over a bare socket.

What a benchmark client in Python does itself, parsing and bookkeeping, is no part of it: bytes are
sent, and the clock stops when the first bytes of a body arrive.
"""

import json
import socket
import statistics
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from lmi_vllm.features.bench.plan import LengthRange, LoadPlan

TOKENS: Final = 4
# Greedy like the floor (`integration.bench.floor`): sampling would be time of the engine.
FIELDS: Final[Mapping[str, tuple[str, str, Mapping[str, Any], bytes]]] = MappingProxyType(
    {  # dialect -> path, the prompt's field, the others, what only the end of a whole answer has
        "lmi": (
            "/invocations",
            "inputs",
            {"stream": True, "parameters": {"max_new_tokens": TOKENS, "ignore_eos_token": True}},
            b'"generated_text":',
        ),
        "completions": (
            "/v1/completions",
            "prompt",
            {"stream": True, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0},
            b"data: [DONE]",
        ),
    }
)
_HEAD_END: Final = b"\r\n\r\n"
_BODY_END: Final = b"\r\n0\r\n\r\n"
_TIMEOUT_SECONDS: Final = 60.0


def prompts(requests: int, words: int) -> list[str]:
    """Return the prompts of one round, the same for every server and the floor."""
    plan = LoadPlan(prompt_words=LengthRange(words, words), seed=1).requests()
    return [plan.next().prompt for _ in range(requests)]


def first_token(url: str, dialect: str, requests: int, words: int) -> float:
    """Return the median milliseconds of so many streams on one connection.

    Raises:
        AssertionError: an answer that is no whole stream.
    """
    address = urlsplit(url)
    path, field, rest, end = FIELDS[dialect]
    found = []
    with socket.create_connection((address.hostname, address.port), _TIMEOUT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for prompt in prompts(requests, words):
            body = json.dumps({field: prompt, **rest}).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            found.append(_exchange(connection, head.encode() + body, end))
    return statistics.median(found)


def _exchange(connection: socket.socket, request: bytes, end: bytes) -> float:
    """Return the milliseconds until a body began; all of it is read."""
    began, first, answer = time.perf_counter(), 0.0, b""
    connection.sendall(request)
    while not answer.endswith(_BODY_END):
        piece = connection.recv(1 << 16)
        now = time.perf_counter()
        answer += piece
        _, _, body = answer.partition(_HEAD_END)
        first = first or (now if body else 0.0)
        if not piece or not answer.startswith(b"HTTP/1.1 200 "):
            raise AssertionError(answer)
    if end not in answer:
        raise AssertionError(answer)
    return (first - began) * 1e3
