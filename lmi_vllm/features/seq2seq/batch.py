"""The sequences that the model runs now: each step chooses the next token of every one."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import torch

from lmi_vllm.errors import EngineFailureError, LmiError
from lmi_vllm.features.seq2seq.decoding import DecodingBatch
from lmi_vllm.features.seq2seq.model import LoadedModel, model_logits_processors
from lmi_vllm.features.seq2seq.sampling import Choice, Sampling, TokenSampler
from lmi_vllm.features.seq2seq.text import TextStream, TokenTexts
from lmi_vllm.messages import GeneratedToken, GenerationChunk, TokenLogprob
from lmi_vllm.telemetry.records import SequenceFigures

logger = logging.getLogger(__name__)

_SEEDS: Final = 1 << 63

Item = GenerationChunk | LmiError
Deliver = Callable[[Item], None]
Delivery = tuple[Deliver, Item]


@dataclass(slots=True, eq=False)
class StepRequest:
    """One prompt and its state on the step thread; `deliver` is called on the event loop."""

    prompt: Sequence[int]
    sampling: Sampling
    bad_words: Sequence[Sequence[int]]
    is_streaming: bool
    deliver: Deliver
    owner: object  # the client's request that it is of: all prompts of a list have the same
    is_aborted: bool = False
    encoder_states: torch.Tensor | None = None  # [1, token, feature], shared by its sequences
    open_sequences: int = 0
    generated: int = 0
    queued: float = field(default_factory=time.time)
    joined: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def figures(self) -> SequenceFigures:
        """Return the token counts and times (seconds) so far, for the request's record."""
        first, last = self.first_token, self.last_token
        each = max(
            1, self.generated // self.sampling.n
        )  # tokens of one sequence: they run side by side
        return SequenceFigures(
            len(self.prompt),
            self.generated,
            None if self.joined is None else self.joined - self.queued,
            first,
            (last - first) / (each - 1) if first and last and each > 1 else None,
        )


class _BatchRow:
    """One sequence: its tokens and text, and the part of both that is not delivered yet."""

    def __init__(
        self, request: StepRequest, index: int, sampler: TokenSampler, text: TextStream
    ) -> None:
        self.request = request
        self.index = index
        self.sampler = sampler
        self.text = text
        self.pieces: list[GeneratedToken] = []
        self.cumulative = 0.0

    @property
    def newest(self) -> int:
        """The last token chosen, which the next step takes as input."""
        return self.sampler.tokens[-1]

    def chunk(self, finish_reason: str | None, stop_reason: str | int | None) -> GenerationChunk:
        """Return the tokens that were not delivered yet, and empty them."""
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


class RunningBatch:
    """The sequences that run, one row each; only the thread that runs the model uses it.

    `on_closed` is called with each request whose last sequence has ended.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        texts: TokenTexts,
        seed: int | None,
        on_closed: Callable[[StepRequest], None],
    ) -> None:
        self._loaded = loaded
        self._texts = texts
        self._seeds = random.Random(seed)
        self._on_closed = on_closed
        self._special = frozenset(loaded.tokenizer.all_special_ids)
        self._rules = model_logits_processors(loaded.generation, loaded.end_tokens)
        self._batch = DecodingBatch(loaded.model, loaded.start_token)
        self._rows: list[_BatchRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def owners(self) -> Mapping[object, int]:
        """Number of rows of each owner that has any."""
        return Counter(row.request.owner for row in self._rows)

    def step(self) -> Sequence[Delivery]:
        """Choose the next token of every row; return the chunks and errors to deliver."""
        ready: list[Delivery] = []
        if self._rows:
            logits = self._batch.step([row.newest for row in self._rows])
            pairs = zip(self._rows, logits, strict=True)
            self._keep([self._advance(row, scores, ready) for row, scores in pairs])
        return ready

    def join(self, request: StepRequest, index: int) -> Sequence[Delivery]:
        """Begin a sequence with its first token; return the chunks and errors to deliver."""
        ready: list[Delivery] = []
        try:
            row = self._new_row(request, index)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is of this request)
            _fail(request, error, ready)
            return ready
        if request.encoder_states is None:
            request.joined = time.time()
            request.encoder_states = self._batch.encode(request.prompt)
        scores = self._batch.join(request.encoder_states)
        self._rows.append(row)
        self._keep([True] * (len(self._rows) - 1) + [self._advance(row, scores, ready)])
        return ready

    def drop(self, gone: Set[StepRequest]) -> None:
        """Remove the sequences of these requests."""
        self._keep([row.request not in gone for row in self._rows])

    def clear(self) -> None:
        """Remove all sequences."""
        self._rows.clear()
        self._batch.keep([])

    def _new_row(self, request: StepRequest, index: int) -> _BatchRow:
        sampling = request.sampling
        seed = sampling.seed
        seed = self._seeds.randrange(_SEEDS) if seed is None else seed + index
        generator = torch.Generator().manual_seed(seed)
        loaded = self._loaded
        sampler = TokenSampler(
            sampling, self._rules, loaded.start_token, loaded.end_tokens, request.bad_words,
            generator,
        )  # fmt: skip
        text = TextStream(
            loaded.tokenizer.backend_tokenizer,
            sampling.stop,
            includes_stop=sampling.include_stop_str_in_output,
            skips_special=sampling.skip_special_tokens,
        )
        return _BatchRow(request, index, sampler, text)

    def _advance(self, row: _BatchRow, scores: torch.Tensor, ready: list[Delivery]) -> bool:
        """Choose the row's next token; returns whether it goes on.

        What fails here is this row's alone: the model has run, and no other row is looked at.
        """
        try:
            return self._chosen(row, scores, ready)
        except Exception as error:  # noqa: BLE001 (no request may end the others)
            _fail(row.request, error, ready)
            return False

    def _chosen(self, row: _BatchRow, scores: torch.Tensor, ready: list[Delivery]) -> bool:
        request = row.request
        choice = row.sampler.choose(scores)
        reason: str | int | None
        finish, reason, has_text = self._end_by_token(row, choice.token)
        if has_text:
            count = len(row.sampler.tokens)
            stop = row.text.add(choice.token, looks_for_stop=count > request.sampling.min_tokens)
            if stop is not None:
                finish, reason = "stop", stop
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
        sampling, count = row.request.sampling, len(row.sampler.tokens)
        shows_end = sampling.include_stop_str_in_output
        if count > sampling.min_tokens or not sampling.min_tokens:
            if not sampling.ignore_eos and token in self._loaded.end_tokens:
                return "stop", None, shows_end and not sampling.skip_special_tokens
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

    def _keep(self, goes_on: Sequence[bool]) -> None:
        kept = [position for position, stays in enumerate(goes_on) if stays]
        self._batch.keep(kept)
        self._rows = [self._rows[position] for position in kept]

    def _close(self, request: StepRequest) -> None:
        """Count a sequence that has ended; with the last one, the request is closed."""
        request.open_sequences -= 1
        if not request.open_sequences:
            request.encoder_states = None
            self._on_closed(request)


def _fail(request: StepRequest, error: Exception, ready: list[Delivery]) -> None:
    """End one request with an error; its other sequences leave before the next step."""
    if not isinstance(error, LmiError):
        logger.error("a token of one request could not be chosen", exc_info=error)
        error = EngineFailureError(f"the next token could not be chosen: {type(error).__name__}")
    request.is_aborted = True
    ready.append((request.deliver, error))
