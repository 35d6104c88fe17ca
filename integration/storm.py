"""Isolation storm: no answer ever comes from another adapter, another version, or the base model.

Clients send requests to random adapters and the base model in every possible way. Meanwhile other
clients register, update and remove the same names with changing weights, also under one path. Each
answer is compared with the answer of the same weights alone, before the storm.

    python -m integration.storm --seconds 300
"""

import argparse
import asyncio
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from integration.adapters_support import (
    SINGLE_THREAD,
    StormClient,
    Texts,
    write_weights,
)
from integration.conftest import RunningServer, StartServer, start_server
from tests.support.adapter_files import copy_adapter

NAMES = tuple(f"tenant-{number}" for number in range(5))
WEIGHTS = 8
CLIENTS = 6
OPTIONS = {"OPTION_MAX_CPU_LORAS": "4", **SINGLE_THREAD}
BASE = "base"


@dataclass
class Life:
    """One version of one name: when it may be, and when it certainly is, what the name means."""

    weights: str
    asked: float
    sure_from: float = float("inf")
    sure_until: float = float("inf")
    gone: float = float("inf")


@dataclass
class Storm:
    """The state all clients and managers share, and what they found."""

    client: StormClient
    folder: Path
    expected: dict[str, Texts]
    rng: Random
    until: float
    lives: dict[str, list[Life]] = field(default_factory=lambda: {name: [] for name in NAMES})
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    is_exact: bool = True  # False: kernels of a GPU round by the size of the batch
    pin_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def goes_on(self) -> bool:
        """Whether there is time left, and nothing wrong yet."""
        return time.monotonic() < self.until and not self.wrong

    def allowed(self, name: str, sent: float, answered: float) -> tuple[set[str], bool]:
        """Return the weights the name may have meant in this window, and whether it may be gone."""
        if name == BASE:
            return {BASE}, False
        lives = self.lives[name]
        weights = {life.weights for life in lives if life.asked <= answered and sent <= life.gone}
        is_sure = any(life.sure_from <= sent and answered <= life.sure_until for life in lives)
        return weights, not is_sure

    def judge(self, name: str, key: str, sent: float, status: int, text: str) -> None:
        """Count an answer, or keep what is wrong with it."""
        weights, may_be_gone = self.allowed(name, sent, time.monotonic())
        is_unknown = "not found" in text or "does not exist" in text
        if status in (404, 424) and may_be_gone and is_unknown:
            self.counts["refused while the name was changing"] += 1
            return
        right = {self.expected[item][key] for item in weights}
        if status == 200 and text in right:
            self.counts["checked"] += 1
            self.counts["checked against one version only"] += len(weights) == 1
            self.counts["of the base model"] += name == BASE
            return
        if status == 200 and not self.is_exact and nearest(self.expected, key, text) <= weights:
            self.counts["rounded otherwise"] += 1
            return
        source = [item for item, texts in self.expected.items() if texts[key] == text]
        self.wrong.append(f"{name} ({sorted(weights)}) {key}: {status} {text!r} is {source}")


def nearest(expected: Mapping[str, Texts], key: str, text: str) -> set[str]:
    """Return whose answers begin as `text` does for the longest; all of them where none does."""
    shared = {item: _shared(texts[key], text) for item, texts in expected.items()}
    return {item for item, length in shared.items() if length == max(shared.values())}


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


async def ask_randomly(storm: Storm) -> None:
    """Send requests until the storm ends; each is judged."""
    while storm.goes_on:
        asked = [storm.rng.choice((*NAMES, *NAMES, BASE)) for _ in range(storm.rng.choice((1, 3)))]
        way = storm.rng.choice(storm.client.WAYS) if len(asked) == 1 else "list"
        prompt = storm.rng.choice(storm.client.PROMPTS)
        sent = time.monotonic()
        status, texts = await storm.client.ask(asked, prompt, way, base=BASE)
        if len(asked) > 1 and status != 200:
            gone = any(storm.allowed(name, sent, time.monotonic())[1] for name in asked)
            storm.counts["lists refused while a name was changing"] += gone
            if not gone:
                storm.wrong.append(f"list {asked}: {status} {texts}")
            continue
        for name, text in zip(asked, texts, strict=True):
            storm.judge(name, storm.client.key(prompt, way), sent, status, text)


async def manage(storm: Storm, name: str) -> None:
    """Register, update and remove one name, each time with other weights."""
    place = storm.folder / "places" / name
    while storm.goes_on:
        weights = storm.rng.choice([item for item in storm.expected if item != BASE])
        source = storm.folder / weights
        if storm.rng.random() < 0.6:  # the same path as the version before
            source = copy_adapter(place, source)
        life = Life(weights, asked=time.monotonic())
        storm.lives[name].append(life)
        preload = storm.rng.choice(("true", "true", "false"))
        query = {"name": name, "src": str(source), "preload": preload}
        await expect(storm, 200, "POST", "/adapters", query)
        life.sure_from = time.monotonic()
        await asyncio.sleep(storm.rng.uniform(0.1, 1.5))
        await update_randomly(storm, name)
        if storm.rng.random() < 0.5:
            await expect(storm, 409, "POST", "/adapters", query)
        life.sure_until = time.monotonic()
        await expect(storm, 200, "DELETE", f"/adapters/{name}", {})
        life.gone = time.monotonic()
        if source == place:
            shutil.rmtree(place)


async def update_randomly(storm: Storm, name: str) -> None:
    """Change a flag of a registered adapter; one of two slots may be pinned at a time."""
    change = storm.rng.choice(("nothing", "unload", "load", "pin"))
    path = f"/adapters/{name}/update"
    if change == "unload":
        await expect(storm, 200, "POST", path, {"preload": "false"})
    elif change == "load":
        await expect(storm, 200, "POST", path, {"preload": "true"})
    elif change == "pin" and not storm.pin_turn.locked():
        async with storm.pin_turn:
            await expect(storm, 200, "POST", path, {"preload": "true", "pin": "true"})
            await asyncio.sleep(storm.rng.uniform(0.2, 1.0))
            # Unpinned by removal only: give the slot back before the next pin.
            weights = storm.lives[name][-1]
            weights.sure_until = time.monotonic()
            await expect(storm, 200, "DELETE", f"/adapters/{name}", {})
            again = {"name": name, "src": str(storm.folder / weights.weights)}
            await expect(storm, 200, "POST", "/adapters", again)


async def break_in(storm: Storm) -> None:
    """Register broken adapters all the time; none may be listed, and nothing may end."""
    bad = write_weights(storm.folder / "bad", seed=99)
    (bad / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    for number in itertools.count():
        if not storm.goes_on:
            return
        query = {"name": f"bad-{number}", "src": str(bad)}
        await expect(storm, 424, "POST", "/adapters", query)
        await asyncio.sleep(0.5)


async def expect(storm: Storm, status: int, method: str, path: str, query: dict[str, str]) -> None:
    """Carry out a management call whose status is known."""
    answered, text = await storm.client.manage(method, path, query)
    storm.counts[f"{method} {'update' if 'update' in path else 'adapter'} {answered}"] += 1
    if answered != status:
        storm.wrong.append(f"{method} {path} {query}: {answered} instead of {status}: {text}")


async def learn(client: StormClient, folder: Path, *, is_exact: bool) -> dict[str, Texts]:
    """Return what the base and each set of weights answer alone; those unlike all others.

    Where rounding may decide, those that answer the same in company.
    """
    expected = {BASE: await client.texts_of(None)}
    for number in range(16 * WEIGHTS):
        if len(expected) == WEIGHTS:
            return expected
        name = f"w{number}"
        source = write_weights(folder / name, seed=number)
        await client.manage("POST", "/adapters", {"name": name, "src": str(source)})
        found = await client.texts_of(name)
        company = () if is_exact else [client.texts_of(name) for _ in range(CLIENTS)]
        is_firm = all(texts == found for texts in await asyncio.gather(*company))
        await client.manage("DELETE", f"/adapters/{name}", {})
        if is_firm and all(
            found[key] != texts[key] for texts in expected.values() for key in texts
        ):
            expected[name] = found
    raise AssertionError(f"only {len(expected)} sets of weights can be told from each other")


async def rage(url: str, seconds: float, seed: int, *, is_exact: bool = True) -> Storm:
    """Return the storm once it is over."""
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    timeout = aiohttp.ClientTimeout(total=120)
    try:
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            client = StormClient(session)
            expected = await learn(client, folder, is_exact=is_exact)
            storm = Storm(client, folder, expected, Random(seed), time.monotonic() + seconds)
            storm.is_exact = is_exact
            async with asyncio.TaskGroup() as group:
                for name in NAMES:
                    group.create_task(manage(storm, name))
                for _ in range(CLIENTS):
                    group.create_task(ask_randomly(storm))
                group.create_task(break_in(storm))
            return storm
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(storm: Storm) -> str:
    """Return the numbers, and what went wrong."""
    counts = ", ".join(f"{name}: {count}" for name, count in sorted(storm.counts.items()))
    return f"requests {counts}; crossings: {len(storm.wrong)}" + "".join(
        f"\n  {item}" for item in storm.wrong[:10]
    )


def start(start_one: Any, front_ends: int = 1) -> RunningServer:
    """Return a ready server with two slots and four adapters in memory."""
    environ = {**OPTIONS, "LMI_FRONTEND_PROCESSES": str(front_ends)}
    server = start_one("--demo", "--port", "0", environ=environ)
    return RunningServer(server, server.url_when_ready())


@pytest.mark.vllm
def test_storm_crosses_no_adapters(server_process: StartServer) -> None:
    """Half a minute of everything at once: every answer is that of the adapter named."""
    server = start(partial(server_process, is_forked=True))
    storm = asyncio.run(rage(server.url, 25, seed=int(time.time())))
    print(report(storm))
    assert not storm.wrong, server.process.describe()
    assert storm.counts["checked"] > 50


def main() -> int:
    """Run the storm from the command line; exit code 1 after a crossing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--front-ends", type=int, default=1, help="LMI_FRONTEND_PROCESSES")
    given = parser.parse_args()
    server = start(
        lambda *words, **more: start_server(Path(tempfile.gettempdir()), *words, **more),
        given.front_ends,
    )
    try:
        storm = asyncio.run(rage(server.url, given.seconds, given.seed))
    finally:
        server.process.kill()
    print(f"seed {given.seed}, {given.seconds:g} s: {report(storm)}")
    return 1 if storm.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
