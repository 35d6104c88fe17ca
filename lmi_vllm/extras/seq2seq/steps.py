"""The one thread that runs the model: between two steps of the batch, requests join and leave.

A sequence joins as soon as a row is free and leaves with its last token, so no request waits
for a whole batch. Whatever goes wrong in a step ends the engine, as the death of vLLM's process
does: what runs and what comes is told `EngineDeadError`.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from lmi_vllm.errors import EngineDeadError, LmiError
from lmi_vllm.extras.seq2seq.model import DecodingBatch, LoadedModel, model_rules
from lmi_vllm.extras.seq2seq.sampling import Choice, Sampling, TokenChooser
from lmi_vllm.extras.seq2seq.text import TextStream, TokenTexts
from lmi_vllm.messages import GeneratedToken, GenerationChunk, TokenLogprob
from lmi_vllm.telemetry.metrics import ENGINE_SEQUENCES
from lmi_vllm.telemetry.records import WorkFigures

logger = logging.getLogger(__name__)

JOINS_PER_STEP: Final = 4  # so that a crowd at the door does not stop those who run
_SEEDS: Final = 1 << 63

Item = GenerationChunk | LmiError
Deliver = Callable[[Item], None]


@dataclass(slots=True, eq=False)
class StepRequest:
    """One prompt on its way through the thread; `deliver` is called on the event loop."""

    prompt: Sequence[int]
    sampling: Sampling
    bad_words: Sequence[Sequence[int]]
    is_streaming: bool
    deliver: Deliver
    is_aborted: bool = False
    memory: torch.Tensor | None = None  # the encoder's answer, shared by its sequences
    open_sequences: int = 0
    generated: int = 0
    queued: float = field(default_factory=time.time)
    joined: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def figures(self) -> WorkFigures:
        """Return what has been counted so far, for the request's record."""
        first, last = self.first_token, self.last_token
        each = max(1, self.generated // self.sampling.n)  # its sequences run side by side
        return WorkFigures(
            len(self.prompt),
            self.generated,
            None if self.joined is None else self.joined - self.queued,
            first,
            (last - first) / (each - 1) if first and last and each > 1 else None,
        )


class _BatchRow:
    """One sequence: its tokens, its text and what of both has not been delivered yet."""

    def __init__(
        self, request: StepRequest, index: int, chooser: TokenChooser, text: TextStream
    ) -> None:
        self.request = request
        self.index = index
        self.chooser = chooser
        self.text = text
        self.pieces: list[GeneratedToken] = []
        self.cumulative = 0.0

    @property
    def newest(self) -> int:
        """The token that the model is to see next."""
        return self.chooser.tokens[-1]

    def chunk(self, finish_reason: str | None, stop_reason: str | int | None) -> GenerationChunk:
        """Return what is to be delivered, once."""
        tokens, self.pieces = tuple(self.pieces), []
        return GenerationChunk(
            self.index,
            tokens,
            "".join(token.text for token in tokens),
            finish_reason,
            stop_reason,
            prompt_tokens=len(self.request.prompt),
            cumulative_logprob=None if self.request.sampling.logprobs is None else self.cumulative,
        )


class StepThread:
    """Runs requests on one model; every method but `run` is for the event loop."""

    def __init__(
        self, loaded: LoadedModel, texts: TokenTexts, most_rows: int, seed: int | None
    ) -> None:
        self.progress = 0
        self.dead = asyncio.Event()
        self._loaded = loaded
        self._texts = texts
        self._most_rows = most_rows
        self._seeds = random.Random(seed)
        self._special = frozenset(loaded.tokenizer.all_special_ids)
        self._rules = model_rules(loaded.generation, loaded.end_tokens)
        self._batch = DecodingBatch(loaded.model, loaded.start_token)
        self._rows: list[_BatchRow] = []
        self._waiting: deque[tuple[StepRequest, int]] = deque()
        self._requests: set[StepRequest] = set()
        self._turn = threading.Condition()
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self.run, name="transformers-steps", daemon=True)
        self._thread.start()

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    def submit(self, request: StepRequest) -> None:
        """Queue a request.

        Raises:
            EngineDeadError: the thread has ended.
        """
        with self._turn:
            if self._is_over:
                raise EngineDeadError
            request.open_sequences = request.sampling.n
            self._requests.add(request)
            self._waiting.extend((request, index) for index in range(request.sampling.n))
            self._turn.notify()

    def abort(self, request: StepRequest) -> None:
        """Let a request go before the next step; one that has ended is ignored."""
        with self._turn:
            request.is_aborted = True
            self._turn.notify()

    def stop(self, seconds: float) -> bool:
        """End the thread after its step; returns whether it ended in time."""
        with self._turn:
            self._is_over = True
            self._turn.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Be dead for all who wait, while the thread hangs in a step; call it on the event loop."""
        with self._turn:
            self._is_over = True
            left = [request for request in self._requests if not request.is_aborted]
            self._requests.clear()
            self._waiting.clear()
        self.dead.set()
        for request in left:
            request.deliver(EngineDeadError())

    def run(self) -> None:
        """Step until told to stop, or until a step fails."""
        try:
            with torch.inference_mode():
                while self._has_work():
                    self._turn_once()
            self._end(is_death=False)
        except BaseException:
            logger.exception("the step loop of the Transformers engine failed")
            self._end(is_death=True)

    def _has_work(self) -> bool:
        """Wait for something to do; False when there will be nothing any more."""
        with self._turn:
            self._count()
            self._turn.wait_for(lambda: self._is_over or self._rows or self._waiting)
            self._drop_aborted()
            self._count()
            return not self._is_over

    def _count(self) -> None:
        ENGINE_SEQUENCES.labels("running").set(len(self._rows))
        ENGINE_SEQUENCES.labels("waiting").set(len(self._waiting))

    def _drop_aborted(self) -> None:
        gone = {request for request in self._requests if request.is_aborted}
        if not gone:
            return
        self._waiting = deque(one for one in self._waiting if one[0] not in gone)
        self._keep([row.request not in gone for row in self._rows])
        self._requests -= gone

    def _turn_once(self) -> None:
        """One step of the batch, then those who wait join."""
        ready: list[tuple[Deliver, Item]] = []
        if self._rows:
            logits = self._batch.step([row.newest for row in self._rows])
            pairs = zip(self._rows, logits, strict=True)
            self._keep([self._advance(row, scores, ready) for row, scores in pairs])
        for _ in range(JOINS_PER_STEP):
            if (joining := self._next_waiting()) is None:
                break
            row, scores = self._join(*joining)
            self._rows.append(row)
            self._keep([True] * (len(self._rows) - 1) + [self._advance(row, scores, ready)])
        self.progress += 1
        if ready:
            self._loop.call_soon_threadsafe(_deliver_all, ready)

    def _next_waiting(self) -> tuple[StepRequest, int] | None:
        with self._turn:
            is_free = self._waiting and len(self._rows) < self._most_rows
            return self._waiting.popleft() if is_free else None

    def _join(self, request: StepRequest, index: int) -> tuple[_BatchRow, torch.Tensor]:
        sampling = request.sampling
        if request.memory is None:
            request.joined = time.time()
            request.memory = self._batch.encode(request.prompt)
        seed = sampling.seed
        seed = self._seeds.randrange(_SEEDS) if seed is None else seed + index
        generator = torch.Generator().manual_seed(seed)
        loaded = self._loaded
        chooser = TokenChooser(
            sampling, self._rules, loaded.start_token, loaded.end_tokens, request.bad_words,
            generator,
        )  # fmt: skip
        text = TextStream(
            loaded.tokenizer.backend_tokenizer,
            sampling.stop,
            includes_stop=sampling.include_stop_str_in_output,
            skips_special=sampling.skip_special_tokens,
        )
        return _BatchRow(request, index, chooser, text), self._batch.join(request.memory)

    def _advance(
        self, row: _BatchRow, scores: torch.Tensor, ready: list[tuple[Deliver, Item]]
    ) -> bool:
        """Choose the row's next token; returns whether it goes on."""
        request = row.request
        try:
            choice = row.chooser.choose(scores)
        except LmiError as error:  # of this request alone; its other sequences go before the next
            request.is_aborted = True
            ready.append((request.deliver, error))
            return False
        reason: str | int | None
        finish, reason, has_text = self._end_by_token(row, choice.token)
        if has_text:
            count = len(row.chooser.tokens)
            found = row.text.add(choice.token, looks_for_stop=count > request.sampling.min_tokens)
            if found is not None:
                finish, reason = "stop", found
        piece = row.text.take(is_last=finish is not None)
        row.pieces.append(self._token(choice, piece))
        row.cumulative += choice.logprob or 0.0
        request.generated += 1
        request.last_token = time.time()
        request.first_token = request.first_token or request.last_token
        if finish is not None or request.is_streaming:
            if finish is not None:
                self._close(request)
            ready.append((request.deliver, row.chunk(finish, reason)))
        return finish is None

    def _end_by_token(self, row: _BatchRow, token: int) -> tuple[str | None, int | None, bool]:
        """Return the finish reason, the stop reason, and whether the token is part of the text."""
        sampling, count = row.request.sampling, len(row.chooser.tokens)
        shows_end = sampling.include_stop_str_in_output
        if count > sampling.min_tokens or not sampling.min_tokens:
            if not sampling.ignore_eos and token in self._loaded.end_tokens:
                return "stop", None, shows_end
            if token in sampling.stop_token_ids:
                return "stop", token, shows_end
        most = sampling.max_tokens or self._loaded.max_model_len
        return ("length" if count >= most else None), None, True

    def _token(self, choice: Choice, text: str) -> GeneratedToken:
        top = tuple(
            TokenLogprob(token, self._texts.text(token), logprob) for token, logprob in choice.top
        )
        return GeneratedToken(
            choice.token, text, choice.logprob, choice.token in self._special, top
        )

    def _close(self, request: StepRequest) -> None:
        """Count a sequence that has ended; the last one takes the request with it."""
        request.open_sequences -= 1
        if not request.open_sequences:
            request.memory = None
            with self._turn:
                self._requests.discard(request)

    def _keep(self, goes_on: Sequence[bool]) -> None:
        kept = [position for position, stays in enumerate(goes_on) if stays]
        self._batch.keep(kept)
        self._rows = [self._rows[position] for position in kept]

    def _end(self, *, is_death: bool) -> None:
        """Tell everybody who is left, and let the model go."""
        with self._turn:
            self._is_over = True
            left = [request for request in self._requests if not request.is_aborted]
            self._requests.clear()
            self._waiting.clear()
        self._rows.clear()
        self._count()
        self._batch.keep([])

        def tell() -> None:
            if is_death:
                self.dead.set()
            for request in left:
                request.deliver(EngineDeadError())

        with contextlib.suppress(RuntimeError):  # the loop has closed: no request is left
            self._loop.call_soon_threadsafe(tell)


def _deliver_all(ready: Sequence[tuple[Deliver, Item]]) -> None:
    for deliver, item in ready:
        deliver(item)
