"""The sampling parameters of a request, and the sampler that chooses the next token by them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from transformers import LogitsProcessorList

from lmi_vllm.errors import EngineFailureError, PayloadError

MAX_BIAS: Final = 100.0  # as OpenAI's API and vLLM's handlers bound it
MINUS_INFINITY: Final = -9999.0  # how vLLM writes a log probability of minus infinity in JSON
_ENGINE: Final = "encoder-decoder models run on the Transformers engine"
NO_GRAMMARS: Final = f"{{name}} is not available: {_ENGINE}, which has no grammars"
_REFUSED: Final[Mapping[str, str]] = {
    "structured_outputs": NO_GRAMMARS.format(
        name="structured output (response_format, structured_outputs, grammar, guided_*)"
    ),
    "prompt_logprobs": (
        "log probabilities of the prompt (prompt_logprobs, decoder_input_details) are not "
        f"available: {_ENGINE}, and an encoder reads the prompt without predicting it"
    ),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters: the fields of vLLM's SamplingParams that this engine supports."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken each time."""
        return self.temperature < 1e-5  # noqa: PLR2004 (vLLM's own bound)


@dataclass(frozen=True, slots=True)
class SamplingBounds:
    """The loaded model's bounds: tokens, token ids, and log probabilities per token."""

    max_model_len: int
    vocabulary: int
    max_logprobs: int  # -1: no limit


_NAMES: Final = frozenset(field.name for field in fields(Sampling))


def read_sampling(given: Mapping[str, Any], bounds: SamplingBounds) -> Sampling:
    """Return the checked sampling parameters; a None counts as left out.

    Raises:
        PayloadError: a value is out of range, or this engine has no such field.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    for name in wanted.keys() - _NAMES:
        unknown = f"{name} is not available: {_ENGINE}"
        raise PayloadError(_REFUSED.get(name, unknown))
    if wanted.get("allowed_token_ids") == []:
        raise PayloadError("allowed_token_ids: an empty list allows no token")
    sampling = Sampling(**{name: _frozen(value) for name, value in wanted.items()})
    if problem := next(_problems(sampling, bounds), None):
        raise PayloadError(problem)
    return sampling


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple | set) else value


def _problems(sampling: Sampling, bounds: SamplingBounds) -> Iterator[str]:
    limit = bounds.max_logprobs
    ids = [*sampling.allowed_token_ids, *(sampling.logit_bias or {})]
    if sampling.temperature < 0:
        yield f"temperature must be non-negative, got {sampling.temperature}"
    if sampling.n > 1 and sampling.is_greedy:
        yield "n must be 1 when using greedy sampling"
    if not sampling.spaces_between_special_tokens and not sampling.skip_special_tokens:
        yield f"spaces_between_special_tokens=false is not available: {_ENGINE}"
    if (count := sampling.logprobs) is not None and not (0 <= count <= limit or limit == -1):
        yield f"logprobs: {count} is more than max_logprobs ({limit})"
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens <= bounds.max_model_len:
        yield (
            f"max_tokens: {sampling.max_tokens} is not between 1 and max_model_len "
            f"({bounds.max_model_len})"
        )
    if any(not 0 <= token < bounds.vocabulary for token in ids):
        yield (
            "allowed_token_ids, logit_bias: a token id is out of the model's vocabulary "
            f"(0 to {bounds.vocabulary - 1})"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token; the log probabilities are the model's, before processors and penalties."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TokenSampler:
    """Chooses the tokens of one sequence, in the order of vLLM's sampler.

    `processors` are the model's own (`model_logits_processors`) and see what Transformers'
    `generate` would show them: `start`, then the tokens so far. Penalties look at the answer only:
    the prompt is on the encoder's side.
    """

    def __init__(
        self,
        sampling: Sampling,
        processors: LogitsProcessorList,
        start: int,
        end_tokens: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self._sampling = sampling
        self._processors = processors
        self._start = start
        self._ends = sorted({*end_tokens, *sampling.stop_token_ids})
        self._bad_words = bad_words
        self._generator = generator

    def choose(self, logits: torch.Tensor) -> Choice:
        """Take the next token by the model's `logits` (one row, float32, on the CPU).

        Raises:
            PayloadError: the request excludes every token.
            EngineFailureError: the model's logits are NaN or infinite.
        """
        scores = self._processed(logits.clone())
        if not math.isfinite(float(scores.max())):  # NaN too
            scores = self._bounded(scores, logits)
        token = int(scores.argmax()) if self._sampling.is_greedy else self._draw(scores)
        self.tokens.append(token)
        count = self._sampling.logprobs
        if count is None:
            return Choice(token)
        logprobs = torch.log_softmax(logits, -1)
        values, ids = logprobs.topk(len(logprobs) if count < 0 else min(count, len(logprobs)))
        top = zip(ids.tolist(), map(_finite, values.tolist()), strict=True)
        return Choice(token, _finite(float(logprobs[token])), tuple(top))

    @staticmethod
    def _bounded(scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return scores whose largest is a number, where a penalty made it larger than any.

        Raises:
            PayloadError: the request excludes every token.
            EngineFailureError: the model's logits are NaN or infinite.
        """
        if bool(logits.isnan().any()) or math.isinf(float(logits.max())):
            raise EngineFailureError(
                "the model's logits are not numbers (T5 overflows in float16: option.dtype=bf16)"
            )
        if float(scores.max()) != math.inf:
            raise PayloadError(
                "no token is left to choose from: allowed_token_ids, bad_words, logit_bias, "
                "min_tokens, penalties"
            )
        return scores.clamp(max=torch.finfo(scores.dtype).max)

    def _processed(self, scores: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        if self._processors:
            seen = torch.tensor([[self._start, *self.tokens]])
            scores = self._processors(seen, scores[None])[0]
        if sampling.allowed_token_ids:
            allowed = torch.full_like(scores, -torch.inf)
            chosen = list(sampling.allowed_token_ids)
            allowed[chosen] = scores[chosen]
            scores = allowed
        for word in self._bad_words:
            *before, last = word
            if not before or self.tokens[-len(before) :] == before:
                scores[last] = -torch.inf
        for token, bias in (sampling.logit_bias or {}).items():
            scores[token] += min(max(bias, -MAX_BIAS), MAX_BIAS)
        banned = [token for token in self._ends if 0 <= token < len(scores)]
        if len(self.tokens) < sampling.min_tokens:
            scores[banned] = -torch.inf
        return self._penalised(scores)

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        if not self.tokens:
            return scores
        ids, counts = torch.tensor(self.tokens).unique(return_counts=True)
        if sampling.repetition_penalty != 1.0:
            factor = sampling.repetition_penalty
            scores[ids] = torch.where(scores[ids] > 0, scores[ids] / factor, scores[ids] * factor)
        scores[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        sampling = self._sampling
        scores = (scores - scores.max()) / sampling.temperature  # the largest stays a number
        if sampling.min_p > 0:
            probabilities = scores.softmax(-1)
            scores[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
        if 0 < sampling.top_k < len(scores):
            least = scores.topk(sampling.top_k).values[-1]
            scores[scores < least] = -torch.inf
        if sampling.top_p < 1:
            ordered, order = scores.softmax(-1).sort(descending=True)
            before = ordered.cumsum(-1) - ordered
            before[0] = -1.0  # the first always stays: as float32 a tiny top_p is 0
            scores[order[before >= sampling.top_p]] = -torch.inf
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


def _finite(logprob: float) -> float:
    """Return a log probability that JSON can hold: at least MINUS_INFINITY."""
    return max(logprob, MINUS_INFINITY)
