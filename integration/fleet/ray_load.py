"""Requests while the replicas of a Ray cluster come and go."""

import threading
import time
from collections import Counter
from http.client import HTTPException
from typing import Final

from integration.client import call

LMI: Final = {"inputs": "The sea is wide", "parameters": {"max_new_tokens": 4}}
THREADS: Final = 4
RETRIES: Final = 60


class Load:
    """Clients that repeat a request which has not been answered; each answer is compared."""

    def __init__(self, url: str, expected: bytes) -> None:
        self.answered: Counter[str] = Counter()
        self._url, self._expected = url, expected
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.answered[self._ask()] += 1

    def _ask(self) -> str:
        for attempt in range(RETRIES):
            try:
                found = call(self._url, "/invocations", LMI, seconds=30)
            except (OSError, HTTPException):
                continue
            if found.status == 200 and found.body == self._expected:
                return "at once" if attempt == 0 else "repeated"
            if found.status < 500:
                return f"wrong: {found.status}"
            time.sleep(0.1)
        return "lost"
