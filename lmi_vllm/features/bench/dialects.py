"""The dialects of generation: a request's body, and the tokens in an answer's bytes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest, RequestOutcome


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The content of one piece of an answer.

    `tokens` are those in this piece; `output_tokens` is the total where the dialect reports one.
    """

    tokens: int = 0
    is_end: bool = False
    error: str | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None


Body = Callable[[LoadRequest, LoadPlan, str], dict[str, Any]]
Read = Callable[[Any], AnswerPiece]


@dataclass(frozen=True, slots=True)
class ServerDialect:
    """The routes, request body and answer format of one family of servers."""

    name: str
    path: str
    whole_path: str  # of answers that are not streamed
    body: Body
    read_row: Read  # of a stream
    read_whole: Read


def lmi_body(request: LoadRequest, plan: LoadPlan, _model: str) -> dict[str, Any]:
    """Return LMI's payload."""
    parameters = _parameters(request, plan)
    if not plan.is_streaming:
        parameters["details"] = True
    body: dict[str, Any] = {"inputs": request.prompt, "parameters": parameters}
    if plan.is_streaming:
        body["stream"] = True
    return body | ({"adapters": request.adapter} if request.adapter else {})


def tgi_body(request: LoadRequest, plan: LoadPlan, _model: str) -> dict[str, Any]:
    """Return TGI's payload; the route decides whether it streams."""
    parameters = _parameters(request, plan) | {"details": True}
    if request.adapter:
        parameters["adapter_id"] = request.adapter
    return {"inputs": request.prompt, "parameters": parameters}


def _parameters(request: LoadRequest, plan: LoadPlan) -> dict[str, Any]:
    """Return the parameters that LMI and TGI name alike."""
    parameters: dict[str, Any] = {"max_new_tokens": request.output_tokens}
    if plan.ignores_eos:
        parameters["ignore_eos_token"] = True
    if plan.temperature is not None:
        parameters["do_sample"] = plan.temperature > 0
    if plan.temperature:  # TGI refuses 0
        parameters["temperature"] = plan.temperature
    return parameters


def completion_body(request: LoadRequest, plan: LoadPlan, model: str) -> dict[str, Any]:
    """Return OpenAI's payload for completions."""
    body = _openai_body(request, plan, model)
    return {"prompt": request.prompt, **body}


def chat_body(request: LoadRequest, plan: LoadPlan, model: str) -> dict[str, Any]:
    """Return OpenAI's payload for chats."""
    messages = [{"role": "user", "content": request.prompt}]
    return {"messages": messages, **_openai_body(request, plan, model)}


def _openai_body(request: LoadRequest, plan: LoadPlan, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.adapter or model,
        "max_tokens": request.output_tokens,
    }
    if plan.ignores_eos:
        body["ignore_eos"] = True
    if plan.temperature is not None:
        body["temperature"] = plan.temperature
    if plan.is_streaming:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def read_token_row(row: Any) -> AnswerPiece:
    """Return the content of a row of LMI's or TGI's stream, which holds one token."""
    if not isinstance(row, Mapping):
        return AnswerPiece(error=f"a row that is no object: {row!r:.100}")
    if row.get("error"):
        return AnswerPiece(error=str(row["error"]))
    token = row.get("token")
    is_end = row.get("generated_text") is not None
    details = row.get("details")
    return AnswerPiece(
        int(isinstance(token, Mapping)),
        is_end,
        prompt_tokens=details.get("input_length") if isinstance(details, Mapping) else None,
    )


def read_token_whole(document: Any) -> AnswerPiece:
    """Return the content of a whole answer of LMI or TGI."""
    if isinstance(document, list) and document:
        document = document[0]
    if not isinstance(document, Mapping):
        return AnswerPiece(error=f"no object: {document!r:.100}")
    if "generated_text" not in document:
        return AnswerPiece(error=_message(document))
    details = document.get("details")
    count = details.get("generated_tokens") if isinstance(details, Mapping) else None
    return AnswerPiece(0, is_end=True, output_tokens=count)


def read_openai_row(row: Any) -> AnswerPiece:
    """Return the content of an event of OpenAI's stream; only `usage` has token counts."""
    if not isinstance(row, Mapping):
        return AnswerPiece(error=f"an event that is no object: {row!r:.100}")
    if row.get("error"):
        return AnswerPiece(error=_message(row))
    has_text, is_end = False, False
    for choice in row.get("choices") or ():
        delta = choice.get("delta") or {}
        has_text |= bool(
            choice.get("text")
            or delta.get("content")
            or delta.get("reasoning")
            or delta.get("reasoning_content")
            or delta.get("tool_calls")
        )
        is_end |= choice.get("finish_reason") is not None
    usage = row.get("usage") or {}
    return AnswerPiece(
        int(has_text),
        is_end,
        output_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
    )


def read_openai_whole(document: Any) -> AnswerPiece:
    """Return the content of a whole answer of OpenAI's routes."""
    if not isinstance(document, Mapping) or not document.get("choices"):
        return AnswerPiece(error=_message(document))
    usage = document.get("usage") or {}
    return AnswerPiece(
        is_end=True,
        output_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
    )


def _message(document: Any) -> str:
    """Return the message of an error in any dialect."""
    error = document.get("error", document) if isinstance(document, Mapping) else document
    if isinstance(error, Mapping):
        error = error.get("message", error)
    return str(error)


DIALECTS: Final[Mapping[str, ServerDialect]] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            ServerDialect("lmi", "/invocations", "/invocations", lmi_body, read_token_row,
                    read_token_whole),
            ServerDialect("tgi", "/generate_stream", "/generate", tgi_body, read_token_row,
                    read_token_whole),
            ServerDialect("completions", "/v1/completions", "/v1/completions", completion_body,
                    read_openai_row, read_openai_whole),
            ServerDialect("chat", "/v1/chat/completions", "/v1/chat/completions", chat_body,
                    read_openai_row, read_openai_whole),
        )
    }
)  # fmt: skip


@dataclass(slots=True)
class RowReader:
    """Splits a byte stream into rows: JSON lines, or the data of server-sent events."""

    _rest: bytes = b""
    is_done: bool = field(default=False)  # OpenAI's [DONE] has come

    def feed(self, piece: bytes) -> list[Any]:
        """Return the rows completed by these bytes; a row that is no JSON comes as its text."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [row for line in lines for row in self._rows(line)]

    def end(self) -> list[Any]:
        """Return the last row where no line end followed it, in a list."""
        rest, self._rest = self._rest, b""
        return self._rows(rest)

    def _rows(self, line: bytes) -> list[Any]:
        line = line.strip()
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            return []
        line = line.removeprefix(b"data:").strip()
        if line == b"[DONE]":
            self.is_done = True
            return []
        try:
            return [json.loads(line)]
        except ValueError:
            return [line.decode("utf-8", "replace")]


@dataclass(slots=True)
class Answer:
    """Reads one answer of status 200 into its outcome."""

    dialect: ServerDialect
    outcome: RequestOutcome
    is_streaming: bool
    _rows: RowReader = field(default_factory=RowReader)
    _whole: list[bytes] = field(default_factory=list)
    _is_ended: bool = False
    _reported_tokens: int | None = None

    def feed(self, piece: bytes, now: float) -> None:
        """Add bytes that came at `now`, in seconds; tokens that come together count as one gap."""
        if not self.is_streaming:
            self._whole.append(piece)
            return
        pieces = [self.dialect.read_row(row) for row in self._rows.feed(piece)]
        self._take(pieces, now)

    def end(self, now: float) -> None:
        """Finish the answer; one without its last row counts as a cut stream."""
        if self.is_streaming:
            self._take([self.dialect.read_row(row) for row in self._rows.end()], now)
        else:
            self._take([self._read_whole()], now)
        if self._reported_tokens is not None:
            self.outcome.output_tokens = self._reported_tokens
        if not self._is_ended:
            self.outcome.fail("stream cut", "the answer ended without its last row")

    def _read_whole(self) -> AnswerPiece:
        raw = b"".join(self._whole)
        try:
            return self.dialect.read_whole(json.loads(raw))
        except ValueError:
            return AnswerPiece(error=f"no JSON: {raw[:100]!r}")

    def _take(self, found: list[AnswerPiece], now: float) -> None:
        tokens = sum(one.tokens for one in found)
        if tokens:
            self.outcome.add_tokens(tokens, now)
        for one in found:
            self._is_ended |= one.is_end
            if one.error is not None:
                self.outcome.fail("error in the answer", one.error)
            if one.output_tokens is not None:
                self._reported_tokens = one.output_tokens
            if one.prompt_tokens is not None:
                self.outcome.prompt_tokens = one.prompt_tokens
