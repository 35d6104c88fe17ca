"""No grammar may stall the engine: each new one is compiled and walked in a process that can end.

vLLM compiles a schema, regular expression or grammar in a thread of its engine, which cannot be
stopped, and then asks it for each token inside the engine's step. Both can be made to take minutes
by a request of a few bytes (seen with xgrammar 0.2.8): `minProperties` over 200 optional ones
compiles for 15 s, `((a{1,100}){1,100}){1,100}` takes over a second a token after 90 tokens, and
everybody else waits. So a forked child does both first, and only what was quick reaches the engine.
"""

import asyncio
import contextlib
import hashlib
import os
import random
import resource
import select
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import xgrammar
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from lmi_vllm.engine.vllm.grammar_costs import STEP_SECONDS, check_costs
from lmi_vllm.engine.vllm.processes import close_internet_sockets, end_with_parent

# A child's copy of us may grow by so much; beyond, its allocations fail and it says so.
MEMORY_BYTES: Final = 4 << 30
WALK_TOKENS: Final = 1024  # of an answer that may be so long
WALK_SECONDS: Final = 0.5  # per walk, for a harmless grammar over a large vocabulary
AT_ONCE: Final = 2  # children; more would only slow each other down
REMEMBERED: Final = 4096  # verdicts
_PASSED: Final = b"\0"
_ANSWER_BYTES: Final = 2000


@dataclass(slots=True)
class GrammarGuard:
    """Tries every constraint that is new; `thread` is the parent of the children."""

    llm: Any
    seconds: float
    thread: ThreadPoolExecutor
    _verdicts: "OrderedDict[bytes, str]" = field(default_factory=OrderedDict)
    _running: dict[bytes, "asyncio.Task[str]"] = field(default_factory=dict)
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _backend: Any = None  # XgrammarBackend, once one is needed

    async def check(self, outputs: StructuredOutputsParams, max_tokens: int | None) -> None:
        """Return when the engine may see this constraint for an answer of so many tokens.

        Raises:
            VLLMValidationError: it takes too long or too much memory, or is no grammar at all.
        """
        # Rounded up, so that few lengths of answers need a try of their own.
        steps = min(1 << (max(max_tokens or WALK_TOKENS, 16) - 1).bit_length(), WALK_TOKENS)
        key = _key_of(outputs, steps)
        verdict = self._verdicts.get(key)
        if verdict is None:
            task = self._running.get(key)
            if task is None:  # who asks for the same meanwhile waits for the same child
                task = self._running[key] = asyncio.create_task(self._judge(key, outputs, steps))
                task.add_done_callback(lambda _: self._running.pop(key, None))
            verdict = await asyncio.shield(task)
        if verdict:
            raise VLLMValidationError(verdict)

    async def _judge(self, key: bytes, outputs: StructuredOutputsParams, steps: int) -> str:
        async with self._places:
            if self._backend is None:
                self._backend = await asyncio.to_thread(self._new_backend)
            loop = asyncio.get_running_loop()
            pid, pipe = await loop.run_in_executor(self.thread, self._fork, outputs, steps)
            verdict = await asyncio.to_thread(_wait_for, pid, pipe, self.seconds)
        self._verdicts[key] = verdict
        while len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict

    def _new_backend(self) -> XgrammarBackend:
        """Read the vocabulary once; children share it."""
        config = self.llm.vllm_config
        return XgrammarBackend(
            config,
            tokenizer=self.llm.renderer.tokenizer,
            vocab_size=config.model_config.get_vocab_size(),
        )

    def _fork(self, outputs: StructuredOutputsParams, steps: int) -> tuple[int, int]:
        """Return the child that tries the constraint and the pipe on which it will answer."""
        parent = os.getpid()
        readable, writable = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writable)
            return pid, readable
        try:  # in the child, a copy of this thread alone
            _become_child(parent)
            answer = self._try(outputs, steps)
        except BaseException as error:  # noqa: BLE001 (it must end here, whatever it was)
            answer = str(error).encode("utf-8", "replace")[:_ANSWER_BYTES] or b"refused"
        with contextlib.suppress(OSError):
            os.write(writable, answer)
        os._exit(0)

    def _try(self, outputs: StructuredOutputsParams, steps: int) -> bytes:
        config = self.llm.vllm_config
        params = SamplingParams(structured_outputs=outputs)
        params.verify(
            config.model_config,
            None,
            config.structured_outputs_config,
            self.llm.renderer.tokenizer,
        )
        outputs = params.structured_outputs
        # vLLM may have chosen another backend, and yet compile with the one it used first.
        is_xgrammar = outputs._backend == "xgrammar"
        try:
            grammar = self._backend.compile_grammar(*get_structured_output_key(outputs))
        except Exception:
            if is_xgrammar:
                raise
            return _PASSED
        lengths = np.zeros(self._backend.vocab_size, dtype=np.int32)
        vocabulary = grammar.ctx.tokenizer_info.decoded_vocab
        lengths[: len(vocabulary)] = [len(token) for token in vocabulary]
        _walk(grammar.matcher, lengths, steps)
        return _PASSED


def _key_of(outputs: StructuredOutputsParams, steps: int) -> bytes:
    try:
        kind, text = get_structured_output_key(outputs)
    except RecursionError:
        raise VLLMValidationError("the JSON schema is nested too deeply") from None
    return hashlib.sha256(f"{steps} {kind} {text}".encode("utf-8", "replace")).digest()


def _become_child(parent: int) -> None:
    """Hold nothing of the server's, end with it, and have bounded memory."""
    os.setpgid(0, 0)
    os.nice(5)  # those who wait for tokens come first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    close_internet_sockets()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _walk(matcher: Any, lengths: Any, steps: int) -> None:
    """Ask for tokens as the engine would: what each costs may grow with the answer.

    Walks take the same token as long as they may (what a weak model does), the longest one (what
    costs most), and random ones. `lengths` are those of the vocabulary's tokens, in bytes.

    Raises:
        ValueError: one token cost too much, or would before the answer ends.
    """
    walks: list[Callable[[Any], Any]] = [_Persistent(), lambda ids: ids[lengths[ids].argmax()]]
    walks += [random.Random(seed).choice for seed in (1, 2)]
    for choose in walks:
        costs, is_whole = _walk_once(matcher, len(lengths), steps, choose)
        check_costs(costs, steps, is_whole=is_whole)


@dataclass(slots=True)
class _Persistent:
    """Chooses what it chose before, and otherwise anything."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    token: int = -1

    def __call__(self, allowed: Any) -> Any:
        if self.token not in allowed:
            self.token = self.chance.choice(allowed)
        return self.token


def _walk_once(
    matcher: Any, vocab_size: int, steps: int, choose: Callable[[Any], Any]
) -> tuple[list[float], bool]:
    """Return the processor seconds of each token, and whether the walk came to an end."""
    matcher.reset()
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    ends = np.array(matcher.stop_token_ids)
    deadline = time.thread_time() + WALK_SECONDS
    costs: list[float] = []
    while len(costs) < steps and not matcher.is_terminated():
        if time.thread_time() > deadline or (costs and costs[-1] > STEP_SECONDS):
            return costs, False
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        cost = time.thread_time() - began
        allowed = np.setdiff1d(_allowed(mask, vocab_size), ends, assume_unique=True)
        if not len(allowed):
            break
        token = int(choose(allowed))
        began = time.thread_time()
        matcher.accept_token(token)
        costs.append(cost + time.thread_time() - began)
    return costs, True


def _allowed(mask: Any, vocab_size: int) -> Any:
    """Return the ids of the tokens that may come next."""
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size])


def _wait_for(pid: int, pipe: int, seconds: float) -> str:
    """Return why the child refuses, or an empty text; it is gone afterwards."""
    try:
        ready, _, _ = select.select([pipe], [], [], seconds)
        answer = os.read(pipe, _ANSWER_BYTES) if ready else None
    finally:
        os.close(pipe)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if answer == _PASSED:
        return ""
    start = "The schema, regular expression or grammar is refused: "
    if answer is None:
        return f"{start}it does not compile within {seconds:g} s (LMI_GRAMMAR_TIMEOUT)"
    return start + (answer.decode("utf-8", "replace") or "compiling it takes too much memory")
