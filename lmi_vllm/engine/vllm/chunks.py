"""Converts vLLM's outputs of a sequence into chunks and figures."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from lmi_vllm.engine.vllm.adapters import BASE_ADAPTER_NAME
from lmi_vllm.engine.vllm.workarounds.not_finite import REASON
from lmi_vllm.messages import GeneratedToken, GenerationChunk, GenerationJob, TokenLogprob
from lmi_vllm.telemetry.metrics import NOT_FINITE
from lmi_vllm.telemetry.records import SequenceFigures

logger = logging.getLogger(__name__)

INCOMPLETE: Final = "\ufffd"  # what a tokenizer shows of a part of a character
MOST_WAITING: Final = 16  # tokens whose text is another than theirs, before it is given up
LONGEST: Final = 4  # bytes, and so tokens, of a character

MINUS_INFINITY: Final = -9999.0  # how vLLM writes a log probability of minus infinity in JSON


class ChunkMaker:
    """Makes the chunks of one job."""

    def __init__(
        self,
        job: GenerationJob,
        tokenizer: Any,
        special_ids: frozenset[int],
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self.special_ids = special_ids
        self._end_ids = end_ids  # of the model; with `ignore_eos` they are like any others
        self._sees_ends = bool(end_ids) and not job.sampling.get("ignore_eos")
        self.count = job.number("logprobs", 0)  # of each token's likeliest ones
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._prompt_start: tuple[int, str] | None = None
        self._splitters: dict[int, TextSplitter] = {}

    def make(self, output: Any, completion: Any) -> GenerationChunk:
        """Return the chunk of one sequence in one of vLLM's outputs."""
        if output.prompt_logprobs and not self._prompt_logprobs:
            self._prompt_logprobs = _prompt_logprobs(output)
            first = output.prompt_token_ids[0]
            self._prompt_start = (first, self._decoded(first))
        text, stop_reason = completion.text, completion.stop_reason
        if completion.finish_reason == "stop":
            text, stop_reason = self._end(completion)
        return GenerationChunk(
            index=completion.index,
            tokens=self.tokens(completion.token_ids, text, completion.logprobs, completion.index),
            text=text,
            finish_reason=completion.finish_reason,
            stop_reason=stop_reason,
            prompt_tokens=len(output.prompt_token_ids or ()),
            cumulative_logprob=completion.cumulative_logprob,
            prompt_logprobs=self._prompt_logprobs,
            prompt_start=self._prompt_start,
        )

    def tokens(
        self,
        ids: Sequence[int],
        text: str,
        logprobs: Sequence[Mapping[int, Any]] | None,
        index: int = 0,
    ) -> tuple[GeneratedToken, ...]:
        """Return the tokens of a step with their texts, which together are this text.

        `index` says of which sequence they are, if the job has several.
        """
        texts = self._token_texts(ids, text, index)
        if logprobs is None:
            return tuple(
                GeneratedToken(token, piece, is_special=token in self.special_ids)
                for token, piece in zip(ids, texts, strict=True)
            )
        return tuple(
            GeneratedToken(
                token,
                piece,
                finite(entry[token].logprob),
                token in self.special_ids,
                self._top(entry) if self.count else (),
            )
            for token, piece, entry in zip(ids, texts, logprobs, strict=True)
        )

    def _end(self, completion: Any) -> tuple[str, str | int | None]:
        """Return the text of a sequence that stopped, and why if not at an end token of the model.

        Such a token has no text where special tokens have none: to keep stop strings is not for it.
        """
        text: str = completion.text
        reason: str | int | None = completion.stop_reason
        end = completion.token_ids[-1] if completion.token_ids and reason is None else reason
        if not self._sees_ends or end not in self._end_ids:
            return text, reason
        sampling = self._job.sampling
        is_shown = sampling.get("skip_special_tokens") is False
        if sampling.get("include_stop_str_in_output") and not is_shown and text:
            text = text.removesuffix(self._tokenizer.decode([end], skip_special_tokens=True))
        return text, None

    def _token_texts(self, ids: Sequence[int], text: str, index: int) -> list[str]:
        if len(ids) == 1 and text and not self._splitters:
            return [text]
        if not self._job.needs_token_texts or self._tokenizer is None:
            return [text] if len(ids) == 1 else [""] * len(ids)
        splitter = self._splitters.get(index)
        if splitter is None:
            is_skipping = bool(self._job.sampling.get("skip_special_tokens", True))
            splitter = self._splitters[index] = TextSplitter(self._tokenizer, is_skipping)
        return splitter.split(ids, text)

    def _top(self, entry: Mapping[int, Any]) -> tuple[TokenLogprob, ...]:
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        return tuple(
            TokenLogprob(token, self._token_text(token, value), finite(value.logprob))
            for token, value in ranked[: self.count]
        )

    def _token_text(self, token: int, value: Any) -> str:
        """Return a token's text; a beam search, or an engine without a tokenizer, has none."""
        text: str | None = value.decoded_token
        return self._decoded(token) if text is None else text

    def _decoded(self, token: int) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token]))


class TextSplitter:
    """Splits the text of a sequence's steps among their tokens, as a stream of single tokens does.

    A character of several tokens is the last one's text.
    """

    __slots__ = ("_decode", "_misses", "_waiting")

    def __init__(self, tokenizer: Any, is_skipping: bool) -> None:
        # `is_skipping`: special tokens have no text.
        self._decode = partial(tokenizer.decode, skip_special_tokens=is_skipping)
        self._waiting: list[int] = []  # tokens whose text has not come yet
        self._misses = 0  # of them, whose complete text is not what came

    def split(self, ids: Sequence[int], text: str) -> list[str]:
        """Return the text of each token; what cannot be told apart is the last one's.

        That is the rest before a stop string, or text that vLLM holds back.
        """
        if len(ids) == 1:
            self._waiting += ids
            if text:
                self._clear()
            return [text]
        texts = []
        rest = text
        for token in ids:
            self._waiting.append(token)
            piece = self._beginning(rest) if self._misses < MOST_WAITING else ""
            texts.append(piece)
            rest = rest[len(piece) :]
        if rest and texts:
            texts[-1] += rest
            self._clear()
        return texts

    def _beginning(self, text: str) -> str:
        """Return what the waiting tokens stand for, if the text begins so; they wait no longer.

        A tokenizer may leave out the space before the first word of what it decodes.
        """
        waiting = self._waiting
        if len(waiting) > MOST_WAITING and self._decode(waiting[-LONGEST:]).endswith(INCOMPLETE):
            return ""  # a long run of bytes that are no text: not all of it is decoded each time
        piece: str = self._decode(waiting)
        if piece.endswith(INCOMPLETE):
            return ""
        found = next((one for one in (piece, f" {piece}") if text.startswith(one)), None)
        if found is None:
            self._misses += 1
            return ""
        self._clear()
        return found

    def _clear(self) -> None:
        self._waiting, self._misses = [], 0


class VllmSequence:
    """One sequence inside vLLM; its counters are read when asked, not while it runs."""

    __slots__ = ("_has_prompt", "_state")

    def __init__(self, state: Any, *, has_prompt: bool) -> None:
        self._state = state  # a RequestState of vLLM's output processor
        self._has_prompt = has_prompt

    @property
    def number(self) -> str:
        """The request's id in the engine."""
        return str(self._state.request_id)

    def figures(self) -> SequenceFigures:
        """Return vLLM's counters; with `disable_log_stats` only the numbers of tokens."""
        state = self._state
        prompt = int(state.prompt_len) if self._has_prompt else 0
        stats = state.stats
        if stats is None:
            detokenizer = state.detokenizer
            return SequenceFigures(prompt, detokenizer.num_output_tokens() if detokenizer else 0)
        generated = int(stats.num_generation_tokens)
        decode = stats.last_token_ts - stats.first_token_ts
        return SequenceFigures(
            prompt,
            generated,
            stats.scheduled_ts - stats.queued_ts if stats.scheduled_ts else None,
            stats.arrival_time + stats.first_token_latency if generated else None,
            decode / (generated - 1) if generated > 1 else None,
        )


def _prompt_logprobs(output: Any) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token, entry[token].decoded_token or "", finite(entry[token].logprob))
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    )


def count_not_finite(adapter: str | None) -> bool:
    """Count a request that ended with numbers that are not finite, if it had no adapter."""
    is_base = adapter in (None, BASE_ADAPTER_NAME)
    NOT_FINITE.labels("model" if is_base else "adapter").inc()
    logger.error("%s: it ends with an error (adapter: %s)", REASON, adapter or "none")
    return is_base


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return max(logprob, MINUS_INFINITY)
