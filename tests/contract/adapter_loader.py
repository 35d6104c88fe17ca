"""Loads adapters into the session's engine for the isolation tests, and asks them."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from lmi_vllm.messages import AdapterRef, GenerationJob
from tests.contract.conftest import LoopThread, answer, collect

PROMPT = "The capital of France is"
IDS = itertools.count(20_000)


class Loader:
    """Loads adapters into the session's engine and unloads what a test leaves."""

    def __init__(self, run: LoopThread, engine: Any) -> None:
        self.run, self.engine = run, engine
        self.loaded: list[AdapterRef] = []

    def load(self, path: Path, name: str = "", *, pinned: bool = False) -> AdapterRef:
        """Load one adapter under an id of its own."""
        ref = AdapterRef(name or path.name, str(path), next(IDS), pinned)
        self.run(self.engine.load_adapter(ref))
        self.loaded.append(ref)
        return ref

    def unload(self, ref: AdapterRef) -> None:
        """Unload one adapter."""
        self.run(self.engine.unload_adapter(ref))

    def ask(self, adapter: AdapterRef | None = None, prompt: str = PROMPT, **fields: Any) -> str:
        """Return the greedy answer of one adapter, alone in the engine."""
        text: str = self.run(answer(self.engine, prompt, adapter=adapter, **fields))
        return text

    def ask_together(self, *adapters: AdapterRef | None) -> list[str]:
        """Return the greedy answers of requests that run at the same time, one per adapter."""

        async def scenario() -> list[str]:
            jobs = [job(adapter) for adapter in adapters]
            chunks = await asyncio.gather(*(collect(self.engine, item) for item in jobs))
            return [item[-1].text for item in chunks]

        texts: list[str] = self.run(scenario())
        return texts


def job(adapter: AdapterRef | None, max_tokens: int = 24, **sampling: Any) -> GenerationJob:
    """Return a greedy job over the common prompt, with a request id of its own."""
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, **sampling}
    return GenerationJob(f"isolation-{next(IDS)}", PROMPT, sampling, adapter)
