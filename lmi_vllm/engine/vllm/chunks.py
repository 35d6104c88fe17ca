"""Converts vLLM's outputs of a sequence into chunks and figures."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmi_vllm.engine.vllm.adapters import BASE_ADAPTER_NAME
from lmi_vllm.engine.vllm.workarounds.not_finite import REASON
from lmi_vllm.messages import GeneratedToken, GenerationChunk, GenerationJob, TokenLogprob
from lmi_vllm.telemetry.metrics import NOT_FINITE
from lmi_vllm.telemetry.records import SequenceFigures

logger = logging.getLogger(__name__)

MINUS_INFINITY: Final = -9999.0  # how vLLM writes a log probability of minus infinity in JSON


class ChunkMaker:
    """Makes the chunks of one job."""

    def __init__(self, job: GenerationJob, tokenizer: Any, special_ids: frozenset[int]) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self.special_ids = special_ids
        self.count = job.number("logprobs", 0)  # of each token's likeliest ones
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def make(self, output: Any, completion: Any) -> GenerationChunk:
        """Return the chunk of one sequence in one of vLLM's outputs."""
        if output.prompt_logprobs and not self._prompt_logprobs:
            self._prompt_logprobs = _prompt_logprobs(output)
        return GenerationChunk(
            index=completion.index,
            tokens=self.tokens(completion.token_ids, completion.text, completion.logprobs),
            text=completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=self._stop_reason(completion),
            prompt_tokens=len(output.prompt_token_ids or ()),
            cumulative_logprob=completion.cumulative_logprob,
            prompt_logprobs=self._prompt_logprobs,
        )

    def tokens(
        self, ids: Sequence[int], text: str, logprobs: Sequence[Mapping[int, Any]] | None
    ) -> tuple[GeneratedToken, ...]:
        """Return the tokens of a step with their texts, which together are this text."""
        texts = self._token_texts(ids, text)
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

    def _stop_reason(self, completion: Any) -> str | int | None:
        """Return why the sequence ended; a beam search gives the model's end token, too."""
        reason: str | int | None = completion.stop_reason
        if self._job.beams and self._tokenizer and reason == self._tokenizer.eos_token_id:
            return None
        return reason

    def _token_texts(self, ids: Sequence[int], text: str) -> list[str]:
        """Split a step's text among its tokens; the texts together are the whole text.

        Tokens may not decode one by one to the text: characters of several tokens, a stop string
        that is cut off, text that is held back. Then the last token gets the remaining text.
        """
        if len(ids) <= 1:
            return [text] * len(ids)
        if not self._job.needs_token_texts:
            return [""] * len(ids)
        texts, rest = [], text
        for token in ids[:-1]:
            piece = self._tokenizer.decode([token], skip_special_tokens=True)
            if piece and rest.startswith(piece):
                rest = rest[len(piece) :]
                texts.append(piece)
            else:
                texts.append("")
        return [*texts, rest]

    def _top(self, entry: Mapping[int, Any]) -> tuple[TokenLogprob, ...]:
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        return tuple(
            TokenLogprob(token, self._token_text(token, value), finite(value.logprob))
            for token, value in ranked[: self.count]
        )

    def _token_text(self, token: int, value: Any) -> str:
        """Return a token's text; a beam search does not decode it."""
        text: str | None = value.decoded_token
        return str(self._tokenizer.decode([token])) if text is None else text


class VllmSequence:
    """One sequence inside vLLM; its counters are read when asked, not while it runs."""

    __slots__ = ("_has_prompt", "_state")

    def __init__(self, state: Any, *, has_prompt: bool) -> None:
        self._state = state  # a RequestState of vLLM's output processor
        self._has_prompt = has_prompt

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
