"""Chunks -> bytes: schemas (LMI, TGI-compatible, metered) times framings (json, jsonlines, sse).

There is no I/O here: each request has its formatter, which gets chunks and returns bytes.
docs/answers.md has the formats; JSON is compact and not ASCII-escaped.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import orjson

from lmi_vllm.errors import tgi_error
from lmi_vllm.inference.request.lmi import LmiRequest, streams_by_default
from lmi_vllm.inference.request.sampling import Candidates
from lmi_vllm.messages import (
    ACCEPTED_FRAMINGS,
    FRAMINGS,
    METERED,
    Framing,
    GeneratedToken,
    GenerationChunk,
    ServingProfile,
    TgiRoute,
    TokenLogprob,
)

# vLLM's finish reasons in LMI's words; the stop reason distinguishes two kinds of `stop`.
_FINISH_REASONS: Final[Mapping[str | None, str]] = MappingProxyType(
    {"length": "length", "abort": "abort", "error": "error"}
)


def frame(framing: Framing, row: object) -> bytes:
    """Return `row` as one framed event."""
    return framing.before + orjson.dumps(row) + framing.after


def choose_framing(accept: str, output_formatter: str | None, *, tgi_compat: bool) -> Framing:
    """Return the framing of a stream: from Accept, else from the configuration."""
    for part in accept.split(","):
        framing = ACCEPTED_FRAMINGS.get(part.split(";")[0].strip().lower())
        if framing is not None:
            return framing
    if streams_by_default(output_formatter):
        return FRAMINGS[str(output_formatter)]
    return FRAMINGS["sse" if tgi_compat else "jsonlines"]


def finish_reason(chunk: GenerationChunk) -> str:
    """Return LMI's finish reason of a last chunk."""
    known = _FINISH_REASONS.get(chunk.finish_reason)
    if known is not None:
        return known
    return "eos_token" if chunk.stop_reason is None else "stop_sequence"


def lmi_token(token: GeneratedToken) -> dict[str, Any]:
    """Return a token of the default schema: both spellings of the log probability."""
    row = bare_token(token)
    if token.logprob is not None:
        row["log_prob"] = row["logprob"] = token.logprob
    return row


def bare_token(token: GeneratedToken) -> dict[str, Any]:
    """Return a token without its log probability, as `logprobs: false` asks for."""
    return {"id": token.id, "text": token.text}


def tgi_token(token: GeneratedToken) -> dict[str, Any]:
    """Return a token of TGI's schema."""
    return {
        "id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "special": token.is_special,
    }


def lmi_error(text: str, status: int) -> dict[str, Any]:
    """Return the last row of a stream that ended early, with the error."""
    return {"error": text, "code": status}


def metered(text: str, reason: str | None, generated: int, prompt: int | None) -> dict[str, Any]:
    """Return an answer of LMI's third-party format, or a row of one: text, counts and metering.

    `prompt` is the number of prompt tokens; None if an earlier row has it.
    """
    metering = {"outputTokenCount": generated}
    return {
        "body": {
            "generation": text,
            "prompt_token_count": prompt,
            "generation_token_count": generated,
            "stop_reason": reason,
        },
        "metering": metering if prompt is None else {"inputTokenCount": prompt, **metering},
    }


def metered_error(text: str, status: int) -> dict[str, Any]:
    """Return the last row of a metered stream that ended early."""
    row = metered("", "error", 0, None) | {"content_type": FRAMINGS["jsonlines"].content_type}
    return row | {"error": {"error_code": status, "error_msg": text}}


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """The differences between the dialects of generated text; there are those of this module."""

    token: Callable[[GeneratedToken], dict[str, Any]]
    error: Callable[[str, int], Mapping[str, Any]]
    is_wrapped: bool  # a single object that is not streamed comes in an array
    is_tgi3: bool = False  # rows of a stream are numbered
    is_metered: bool = False  # only texts and counts, without tokens or details
    is_tgi: bool = False  # rows have null for missing values, `prefill` is complete


LMI_SCHEMA: Final = Schema(lmi_token, lmi_error, is_wrapped=False)
METERED_SCHEMA: Final = Schema(bare_token, metered_error, is_wrapped=False, is_metered=True)
TGI_SCHEMA: Final = Schema(tgi_token, tgi_error, is_wrapped=True, is_tgi=True)
# TGI's own routes: `/` wraps its answer, `/generate` does not.
TGI_ROOT_SCHEMA: Final = replace(TGI_SCHEMA, is_tgi3=True)
TGI_GENERATE_SCHEMA: Final = replace(TGI_ROOT_SCHEMA, is_wrapped=False)


def choose_schema(profile: ServingProfile, tgi_route: TgiRoute | None) -> Schema:
    """Return the dialect of answers to `inputs`."""
    if tgi_route:
        return TGI_ROOT_SCHEMA if tgi_route.is_wrapped else TGI_GENERATE_SCHEMA
    if profile.output_formatter in METERED:
        return METERED_SCHEMA
    return TGI_SCHEMA if profile.tgi_compat else LMI_SCHEMA


# A token with values that occur nowhere else in a row, and their placeholders in a template.
_SAMPLE: Final = GeneratedToken(987654321, "the text", -98765.4321)
# In the order of a row.
_ID, _TEXT, _LOGPROB = map(orjson.dumps, (_SAMPLE.id, _SAMPLE.text, _SAMPLE.logprob))
_Template = tuple[bytes, int]  # a row, and how often it has the log probability


@dataclass(slots=True)
class StreamFormatter:
    """Formats one streamed sequence: one framed row per token."""

    request: LmiRequest
    prompt: str
    schema: Schema
    framing: Framing
    _texts: list[str] = field(default_factory=list)
    _tokens: int = 0
    _templates: dict[bool, _Template] = field(default_factory=dict)  # key: has a log probability

    def rows(self, chunk: GenerationChunk) -> bytes:
        """Return the rows of `chunk`; the last one closes the stream if the chunk ends it."""
        if self.schema.is_metered:
            return b"".join(frame(self.framing, row) for row in self._metered_rows(chunk))
        self._texts.append(chunk.text)
        is_end = chunk.finish_reason is not None
        plain = chunk.tokens[:-1] if is_end else chunk.tokens
        out = [frame(self.framing, self._row(token)) for token in plain]
        if is_end:
            out.append(frame(self.framing, self._last_row(chunk)))
        return b"".join(out)

    def token_row(self, token: int, text: str, logprob: float | None) -> bytes:
        """Return the row of a chunk that is one ordinary token and not the last.

        The bytes are those of `rows`, made from a row that was rendered once.
        """
        has_logprob = logprob is not None
        template = self._templates.get(has_logprob)
        if template is None:
            if self.schema.is_tgi3 or self.schema.is_metered or self.request.top_n_tokens:
                return self.rows(GenerationChunk(0, (GeneratedToken(token, text, logprob),), text))
            template = _template(
                self.schema, self.framing, has_logprob, self.request.wants_logprobs
            )
            self._templates[has_logprob] = template
        self._texts.append(text)
        self._tokens += 1
        row, logprobs = template
        if logprobs:
            return row % (token, orjson.dumps(text), *(orjson.dumps(logprob),) * logprobs)
        return row % (token, orjson.dumps(text))

    def error(self, text: str, code: int) -> bytes:
        """Return the row that ends a stream which failed after its first byte."""
        return frame(self.framing, self.schema.error(text, code))

    def _metered_rows(self, chunk: GenerationChunk) -> Iterator[dict[str, Any]]:
        """Yield a row for each token; the first counts the prompt, the last says what ended it."""
        texts = [token.text for token in chunk.tokens] or [""]  # an abort may have no token
        for position, text in enumerate(texts, start=1):
            prompt = None if self._tokens else chunk.prompt_tokens
            self._tokens += bool(chunk.tokens)
            is_last = chunk.finish_reason is not None and position == len(texts)
            reason = finish_reason(chunk) if is_last else None
            row = metered(text, reason, self._tokens, prompt)
            yield row | {"content_type": FRAMINGS["jsonlines"].content_type}

    def _row(self, token: GeneratedToken | None) -> dict[str, Any]:
        row: dict[str, Any] = {"index": 0}
        if token is not None:
            self._tokens += 1
            row["token"] = _as_row(self.request, self.schema)(token)
            if self.request.top_n_tokens:
                row["top_tokens"] = _top_tokens(token.top, self.schema)
        if self.schema.is_tgi3:
            row["index"] = self._tokens
        return row | _nulls(self.schema)

    def _last_row(self, chunk: GenerationChunk) -> dict[str, Any]:
        text = "".join(self._texts)
        # An aborted sequence may end without a token.
        row = self._row(chunk.tokens[-1] if chunk.tokens else None)
        row["generated_text"] = self.prompt + text if self.request.return_full_text else text
        if self.request.details:
            row["details"] = {
                "finish_reason": finish_reason(chunk),
                "generated_tokens": self._tokens,
                "inputs": self.prompt,
                "seed": self.request.seed,
                "input_length": chunk.prompt_tokens,
            }
            if self.request.decoder_input_details or chunk.prompt_logprobs:
                row["details"]["prefill"] = _prefill(chunk, self.schema)
        return row


def _nulls(schema: Schema) -> dict[str, Any]:
    return {"generated_text": None, "details": None} if schema.is_tgi else {}


def _as_row(request: LmiRequest, schema: Schema) -> Callable[[GeneratedToken], dict[str, Any]]:
    """Return the function that makes a token's row; candidates always have probabilities."""
    return schema.token if request.wants_logprobs else bare_token


@functools.cache
def _template(
    schema: Schema, framing: Framing, has_logprob: bool, wants_logprobs: bool
) -> _Template:
    """Return the row of a token with placeholders for the values that differ between tokens."""
    sample = replace(_SAMPLE, logprob=_SAMPLE.logprob if has_logprob else None)
    token = schema.token if wants_logprobs else bare_token
    framed = frame(framing, {"index": 0, "token": token(sample), **_nulls(schema)})
    framed = framed.replace(b"%", b"%%")
    pattern = framed.replace(_ID, b"%d").replace(_TEXT, b"%b").replace(_LOGPROB, b"%b")
    return pattern, framed.count(_LOGPROB)


def format_result(
    request: LmiRequest, prompt: str, sequences: Sequence[GenerationChunk], schema: Schema
) -> dict[str, Any]:
    """Return the result object of one prompt; `sequences` are its candidates, best first."""
    best = sequences[0]
    if schema.is_metered:
        text, reason = _full_text(request, prompt, best), finish_reason(best)
        answer = metered(text, reason, len(best.tokens), best.prompt_tokens)
        return answer | {"content_type": FRAMINGS["json"].content_type}
    result: dict[str, Any] = {"generated_text": _full_text(request, prompt, best)}
    others = sequences[1:]
    if request.details or others:
        result["details"] = {
            "finish_reason": finish_reason(best),
            "generated_tokens": len(best.tokens),
            "inputs": prompt,
            "seed": _seed(request, best, schema),
            "tokens": list(map(_as_row(request, schema), best.tokens)),
            "prefill": _prefill(best, schema),
            **_all_top_tokens(request, best, schema),
        }
        if others:
            result["details"]["best_of_sequences"] = [
                _other_sequence(request, prompt, chunk, schema) for chunk in others
            ]
    return result


def rank_candidates(
    sequences: Sequence[GenerationChunk], candidates: Candidates
) -> list[GenerationChunk]:
    """Return the sequences of the answer, best first: by probability, or by beam search rank."""
    if candidates.beams:
        ranked = sorted(sequences, key=lambda chunk: chunk.index)
    else:
        ranked = sorted(sequences, key=lambda chunk: -(chunk.cumulative_logprob or 0.0))
    return ranked[: candidates.returned]


def encode_results(results: Sequence[dict[str, Any]], *, is_list: bool, schema: Schema) -> bytes:
    """Return the body of a non-streamed answer: an array for a list, else one object."""
    document: object = results
    if not is_list:
        document = [results[0]] if schema.is_wrapped else results[0]
    return frame(FRAMINGS["json"], document)


def _full_text(request: LmiRequest, prompt: str, chunk: GenerationChunk) -> str:
    return prompt + chunk.text if request.return_full_text else chunk.text


def _other_sequence(
    request: LmiRequest, prompt: str, chunk: GenerationChunk, schema: Schema
) -> dict[str, Any]:
    is_shown = schema.is_tgi or request.decoder_input_details
    prefill = {"prefill": _prefill(chunk, schema)} if is_shown else {}
    seed = {"seed": _seed(request, chunk, schema)} if schema.is_tgi else {}
    return {
        **seed,
        "finish_reason": finish_reason(chunk),
        "generated_tokens": len(chunk.tokens),
        "tokens": list(map(_as_row(request, schema), chunk.tokens)),
        "generated_text": _full_text(request, prompt, chunk),
        **prefill,
        **_all_top_tokens(request, chunk, schema),
    }


def _seed(request: LmiRequest, chunk: GenerationChunk, schema: Schema) -> int | None:
    """Return the seed that repeats this sequence alone: candidates have the seeds that follow."""
    if request.seed is None or not schema.is_tgi or request.candidates.beams:
        return request.seed
    return request.seed + chunk.index


def _prefill(chunk: GenerationChunk, schema: Schema) -> list[dict[str, Any]]:
    tokens = [GeneratedToken(item.id, item.text, item.logprob) for item in chunk.prompt_logprobs]
    if schema.is_tgi and chunk.prompt_start is not None:
        tokens.insert(0, GeneratedToken(*chunk.prompt_start))
    return list(map(schema.token, tokens))


def _all_top_tokens(request: LmiRequest, chunk: GenerationChunk, schema: Schema) -> dict[str, Any]:
    if not request.top_n_tokens:
        return {}
    return {"top_tokens": [_top_tokens(token.top, schema) for token in chunk.tokens]}


def _top_tokens(top: Sequence[TokenLogprob], schema: Schema) -> list[dict[str, Any]]:
    return [schema.token(GeneratedToken(item.id, item.text, item.logprob)) for item in top]
