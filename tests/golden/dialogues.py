"""Golden dialogues: requests that follow each other, with the exact answer to each.

In an expected answer `<id:NAME>` stands for any UUID. The same name stands for the same UUID, also
in later requests. `<time>` is a UTC time in whole seconds, and `<version>` our version.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient

from lmi_vllm._version import __version__
from lmi_vllm.messages import ServingProfile

_MARK = re.compile(r"<id:(\w+)>|<time>|<version>")
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@dataclass(frozen=True)
class Exchange:
    """One request and what is answered: status, content type, some headers, all of the body."""

    method: str
    path: str
    headers: dict[str, str]
    sent: str
    status: int
    content_type: str
    answer_headers: dict[str, str]  # an empty text: the header is absent
    body: str


@dataclass
class Ids:
    """The UUIDs seen so far, by name."""

    known: dict[str, str] = field(default_factory=dict)

    def fill(self, text: str) -> str:
        """Return a request's text with the ids that earlier answers gave."""
        return _MARK.sub(lambda mark: self.known[mark[1]], text)

    def check(self, expected: str, actual: str) -> None:
        """Compare, and learn the ids that are new."""
        pattern, end, new = "", 0, []
        for mark in _MARK.finditer(expected):
            pattern += re.escape(expected[end : mark.start()])
            end, name = mark.end(), mark[1]
            if name is None:
                pattern += _TIME if mark[0] == "<time>" else re.escape(__version__)
            elif name in self.known:
                pattern += re.escape(self.known[name])
            elif name in new:
                pattern += f"(?P={name})"
            else:
                new.append(name)
                pattern += f"(?P<{name}>{_UUID})"
        found = re.fullmatch(pattern + re.escape(expected[end:]), actual)
        assert found, f"expected {expected!r}, got {actual!r}"
        self.known |= found.groupdict()


@dataclass(frozen=True)
class Dialogue:
    """Requests that follow each other, to one server."""

    name: str
    profile: ServingProfile
    steps: list[Exchange]

    async def check(self, client: TestClient[Any, Any]) -> None:
        """Ask one after the other, and compare the bytes and headers of the answers."""
        ids = Ids()
        for step in self.steps:
            headers = {name: ids.fill(value) for name, value in step.headers.items()}
            answer = await client.request(step.method, step.path, data=step.sent, headers=headers)
            while answer.status == 202:  # deferred, and not begun
                await asyncio.sleep(0)
                answer = await client.request(
                    step.method, step.path, data=step.sent, headers=headers
                )
            for name, value in step.answer_headers.items():
                ids.check(value, answer.headers.get(name, ""))
            ids.check(step.body, await answer.text())
            assert (answer.status, answer.content_type) == (step.status, step.content_type)


def load_dialogues(folder: Path) -> list[Dialogue]:
    """Return every dialogue of all files of a folder."""
    return [
        Dialogue(
            f"{path.stem}: {name}",
            ServingProfile(**{"model_name": "demo", **raw.get("profile", {})}),
            [_exchange(one) for one in raw["steps"]],
        )
        for path in sorted(folder.glob("*.json"))
        for name, raw in json.loads(path.read_text()).items()
    ]


def _exchange(raw: dict[str, Any]) -> Exchange:
    request, response = raw["request"], raw["response"]
    sent = request.get("body", "")
    return Exchange(
        method=request.get("method", "POST"),
        path=request.get("path", "/invocations"),
        headers={"Content-Type": "application/json", **request.get("headers", {})},
        sent=sent if isinstance(sent, str) else json.dumps(sent),
        status=response.get("status", 200),
        content_type=response.get("content_type", "application/json"),
        answer_headers=response.get("headers", {}),
        body=response["body"],
    )
