"""What the adapter scenarios share: weights of their own, and a client that asks in every way."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import aiohttp
import orjson

from tests.support.adapter_files import make_adapter

# Two threads bound to the cores of a busy machine wait for each other up to 100 times longer.
SINGLE_THREAD: Final[Mapping[str, str]] = MappingProxyType(
    {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
)
MAX_TOKENS: Final = 12
Texts = dict[str, str]


def write_weights(folder: Path, seed: int) -> Path:
    """Write an adapter whose answers are unlike those of any other seed."""
    return make_adapter(folder, seed)


class StormClient:
    """Asks a server for adapters in each of the ways it offers."""

    WAYS: ClassVar = ("header", "query", "payload", "stream", "completions", "chat-header")
    PROMPTS: ClassVar = (
        "The capital of France is",
        "Water is",
        # More than one block of the prefix cache.
        "The sea is wide and the wind is cold. Water is a clear liquid. " * 12 + "The moon",
    )

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def key(self, prompt: str, way: str) -> str:
        """Return under which answers of the same kind are kept."""
        lane = way if way in ("completions", "chat-header") else "lmi"
        return f"{lane}:{self.PROMPTS.index(prompt)}"

    async def texts_of(self, name: str | None) -> Texts:
        """Return all answers of one adapter, None is the base, asked one by one."""
        texts: Texts = {}
        for prompt in self.PROMPTS:
            for way in ("payload", "completions", "chat-header"):
                status, (text,) = await self.ask([name or ""], prompt, way, base="")
                assert status == 200, text
                texts[self.key(prompt, way)] = text
        return texts

    async def ask(
        self, names: Sequence[str], prompt: str, way: str, *, base: str
    ) -> tuple[int, list[str]]:
        """Return the status and one text per name; for a refusal its whole body."""
        named = ["" if name == base else name for name in names]
        path, body, headers = request_of(named, prompt, way)
        async with self._session.post(path, json=body, headers=headers) as response:
            raw = await response.read()
        if response.status != 200:
            return response.status, [raw.decode()]
        return response.status, texts_of_answer(raw, way)

    async def manage(self, method: str, path: str, query: Mapping[str, str]) -> tuple[int, str]:
        """Carry out a management call."""
        async with self._session.request(method, path, params=query) as response:
            return response.status, await response.text()


def request_of(
    named: Sequence[str], prompt: str, way: str
) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return path, body and headers of a request for adapters (empty: the base) in one way."""
    name = named[0]
    header = {"X-Amzn-SageMaker-Adapter-Identifier": name} if name else {}
    body: dict[str, Any] = {
        "inputs": prompt,
        "parameters": {"max_new_tokens": MAX_TOKENS, "do_sample": False},
    }
    if way == "completions":
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        return "/v1/completions", body | ({"model": name} if name else {}), {}
    if way == "chat-header":
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        return "/v1/chat/completions", body, header
    if way == "list":
        return "/invocations", body | {"inputs": [prompt] * len(named), "adapters": [*named]}, {}
    if way == "query":
        return f"/invocations?adapter={name}", body, {}
    if way == "header":
        return "/invocations", body, header
    return "/invocations", body | {"adapters": name, "stream": way == "stream"}, {}


def texts_of_answer(raw: bytes, way: str) -> list[str]:
    """Return the texts of a whole answer, one per prompt."""
    if way == "stream":
        rows = [orjson.loads(line) for line in raw.splitlines()]
        return ["".join(row["token"]["text"] for row in rows)]
    document = orjson.loads(raw)
    if way == "completions":
        return [document["choices"][0]["text"]]
    if way == "chat-header":
        return [document["choices"][0]["message"]["content"]]
    items = document if isinstance(document, list) else [document]
    return [item["generated_text"] for item in items]
