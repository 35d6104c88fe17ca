"""Rows of OpenAI answers from the Transformers engine: choices, deltas, log probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmi_vllm.features.seq2seq.requests import CHAT
from lmi_vllm.features.seq2seq.sampling import Sampling
from lmi_vllm.features.seq2seq.text import TokenTexts
from lmi_vllm.messages import GenerationChunk

_FINISHED: Final = ("finish_reason", "stop_reason")


@dataclass(slots=True)
class Usage:
    """Tokens of a prompt and of its answer so far."""

    prompt: int = 0
    completion: int = 0

    def row(self) -> dict[str, int]:
        """Return the counts in the fields of vLLM's UsageInfo."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }

    def row_if(self, is_wanted: bool) -> dict[str, dict[str, int]]:
        """Return the `usage` field of an event where `is_wanted`, else {}."""
        return {"usage": self.row()} if is_wanted else {}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that has passed every check, with its prompts as token ids."""

    kind: str
    request: Any
    head: Mapping[str, Any]  # id, object, created, model
    prompts: Sequence[Sequence[int]]
    sampling: Sampling

    @property
    def shows_ids(self) -> bool:
        """Whether token ids are wanted beside the text."""
        return bool(self.request.return_token_ids)


class ReplyRows:
    """Builds rows of answers; tokens are named by their texts."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def choice(self, parsed: ParsedRequest, index: int, chunk: GenerationChunk) -> dict[str, Any]:
        """Return one entry of `choices` of a whole answer."""
        common = {
            "index": index,
            "logprobs": self._logprobs(parsed, chunk, 0),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
            "token_ids": _ids(chunk) if parsed.shows_ids else None,
        }
        if parsed.kind == CHAT:
            return {**common, "message": {"role": "assistant", "content": chunk.text}}
        prompt = list(parsed.prompts[index // parsed.sampling.n]) if parsed.shows_ids else None
        return {**common, "text": chunk.text, "prompt_token_ids": prompt}

    def delta(
        self,
        parsed: ParsedRequest,
        index: int,
        chunk: GenerationChunk,
        offsets: dict[int, int],
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        """Return one entry of `choices` of an event.

        `offsets` holds the characters of each choice so far and is updated.
        """
        logprobs = self._logprobs(parsed, chunk, offsets.get(index, 0))
        ids = _ids(chunk) if parsed.shows_ids else None
        if parsed.kind == CHAT:
            row = {"index": index, "delta": {"content": chunk.text}, "logprobs": logprobs}
            end = {name: getattr(chunk, name) for name in _FINISHED}
            return {**row, **(end if chunk.finish_reason else {"finish_reason": None}),
                    "token_ids": ids}  # fmt: skip
        if logprobs is not None and logprobs["tokens"]:
            offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        prompt = list(parsed.prompts[index // parsed.sampling.n])
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
            "prompt_token_ids": prompt if parsed.shows_ids and is_first else None,
            "token_ids": ids,
        }

    def _logprobs(self, parsed: ParsedRequest, chunk: GenerationChunk, offset: int) -> Any:
        if parsed.sampling.logprobs is None:
            return None
        if parsed.kind == CHAT:
            return {"content": [self._chat_logprob(token) for token in chunk.tokens]}
        names = [self._texts.text(token.id) for token in chunk.tokens]
        offsets = [offset + sum(map(len, names[:position])) for position in range(len(names))]
        tops = [
            {name: token.logprob, **{one.text: one.logprob for one in token.top}}
            for name, token in zip(names, chunk.tokens, strict=True)
        ]
        values = [token.logprob for token in chunk.tokens]
        return {
            "text_offset": offsets, "token_logprobs": values, "tokens": names,
            "top_logprobs": tops,
        }  # fmt: skip

    def _chat_logprob(self, token: Any) -> dict[str, Any]:
        top = [_logprob(one.text, one.logprob) for one in token.top]
        return {**_logprob(self._texts.text(token.id), token.logprob), "top_logprobs": top}


def opening(parsed: ParsedRequest, index: int) -> dict[str, Any]:
    """Return the fields of the first event of a chat: the role, and an empty text."""
    delta = {"role": "assistant", "content": ""}
    ids = list(parsed.prompts[0]) if parsed.shows_ids else None
    row = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return {"choices": [row], "prompt_token_ids": ids, "prompt_text": None}


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def _ids(chunk: GenerationChunk) -> list[int]:
    return [token.id for token in chunk.tokens]
