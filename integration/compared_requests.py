"""The requests that are sent to vLLM's own server and to ours, made out of parts.

Every part is a way in which requests differ: the route, its fields, the bytes of the body, the
content type, the method, the path, the headers, and a client that disconnects in the middle.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

JSON: Final = "application/json"
MODEL: Final = "lmi"
UNKNOWN: Final = "unheard-of"
ADAPTER: Final = "capitals"
LONG: Final = "word " * 3000  # more tokens than the model's 2048
USER: Final = {"role": "user", "content": "What is the capital of France?"}
TEXT: Final = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0, "model": MODEL}
CHAT: Final = {"messages": [USER], "max_tokens": 3, "temperature": 0, "model": MODEL}
RESPONSE: Final = {"input": "Hello", "max_output_tokens": 3, "temperature": 0, "model": MODEL}
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
BATCH: Final = "/v1/chat/completions/batch"
# Every route that generates or reads a JSON body, with the smallest request that it answers.
BODIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "/v1/completions": TEXT,
        "/v1/chat/completions": CHAT,
        BATCH: {**CHAT, "messages": [[USER], [USER]]},
        "/v1/responses": RESPONSE,
        "/v1/messages": CHAT,
        "/v1/messages/count_tokens": {"messages": [USER], "model": MODEL},
        "/tokenize": {"prompt": "Once upon a time", "model": MODEL},
        "/detokenize": {"tokens": [1, 2, 3], "model": MODEL},
        "/generative_scoring": {
            "query": "Is it?", "items": ["yes", "no"], "label_token_ids": [5, 6], "model": MODEL,
        },
        "/v1/systemone": {"model": MODEL},
    }
)  # fmt: skip
HOT: Final = ("/v1/completions", "/v1/chat/completions")
STREAMED: Final = (*HOT, "/v1/responses", "/v1/messages")
READ: Final = ("/v1/models", "/version", "/load", "/health", "/kv_event_sources", "/nothing")
# What this server answers itself, in its own way.
OWN: Final = (
    ("GET", "/ping"), ("POST", "/ping"), ("GET", "/metrics"), ("GET", "/openapi.json"),
    ("GET", "/docs"), ("GET", "/docs/oauth2-redirect"), ("GET", "/redoc"), ("POST", "/adapters"),
    ("DELETE", "/adapters/none"), ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One request; `reads` is how many bytes of the answer are read before the client goes."""

    name: str
    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    reads: int | None = None


def requests() -> tuple[Request, ...]:
    """Return every request to a model that generates, each under a name of its own."""
    found = (
        *_whole(), *_streams(), *_fields(), *_contents(), *_content_types(), *_methods(),
        *_paths(), *_ids(), *_origins(), *_readers(), *_cut(), *_invocations(), *_own(),
    )  # fmt: skip
    names = [each.name for each in found]
    assert len(set(names)) == len(names), "each has a name of its own"
    return found


def pooling_requests() -> tuple[Request, ...]:
    """Return every request to a model that embeds."""
    found = []
    for path, body in POOLED.items():
        found += [
            post("whole", path, body),
            post("unknown model", path, {**body, "model": UNKNOWN}),
            post("model null", path, {**body, "model": None}),
            post("unknown field", path, {**body, "unheard_of": 1}),
            post("too long", path, {name: _lengthened(value) for name, value in body.items()}),
            post("slash", f"{path}/", body),
            post("id in the header", path, body, X_Request_Id="given"),
            post("id in the body", path, {**body, "request_id": "mine"}),
            post("not an object", path, [body]),
            *every_way(path, body),
        ]
        found += [post(f"body {name}", path, CONTENTS[name]) for name in ("empty", "cut", "object")]
        inside = json.dumps(body)[1:-1].encode()
        found += [post(f"body {name}", path, form.replace(b"%b", inside))
                  for name, form in AROUND.items()]  # fmt: skip
    found += [
        post(name, "/v1/embeddings", {**POOLED["/v1/embeddings"], **values})
        for name, values in EMBEDDING_VALUES.items()
    ]
    found += [post("no such route", path, BODIES[path]) for path in HOT]
    return tuple(found)


POOLED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "/v1/embeddings": {"input": "the moon", "model": MODEL},
        "/v2/embed": {
            "texts": ["the moon"], "model": MODEL, "input_type": "search_document",
            "embedding_types": ["float"],
        },
        "/pooling": {"input": "the moon", "model": MODEL, "task": "embed"},
        "/rerank": {"query": "rain", "documents": ["sea", "rain"], "model": MODEL},
        "/v1/rerank": {"query": "rain", "documents": ["sea", "rain"], "model": MODEL},
        "/v2/rerank": {"query": "rain", "documents": ["sea"], "top_n": 1, "model": MODEL},
        "/score": {"text_1": "rain", "text_2": "sea", "model": MODEL},
        "/v1/score": {"queries": "rain", "items": ["sea", "sun"], "model": MODEL},
        "/tokenize": {"prompt": "the moon", "model": MODEL},
    }
)  # fmt: skip
EMBEDDING_VALUES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "list": {"input": ["the moon", "rain"]},
        "ids": {"input": [5, 6]},
        "lists of ids": {"input": [[5], [6, 7]]},
        "ids out of vocabulary": {"input": [999999]},
        "huge ids": {"input": [2**64]},
        "number": {"input": 3},
        "no text": {"input": []},
        "empty text": {"input": ""},
        "surrogate": {"input": "a\ud800"},
        "base64": {"encoding_format": "base64"},
        "bytes": {"encoding_format": "bytes"},
        "bytes only": {"encoding_format": "bytes_only"},
        "odd format": {"encoding_format": "morse"},
        "dimensions": {"dimensions": 7},
        "truncated": {"truncate_prompt_tokens": 2},
        "not normalised": {"use_activation": False},
        "removed field": {"normalize": True},
        "messages": {"input": None, "messages": [USER]},
    }
)


def _lengthened(value: object) -> object:
    return LONG if value in ("the moon", "rain") else value


# How every route is asked: what of it is no answer's, vLLM refuses in its own words.
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
TYPES: Final = (
    None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/json; charset=utf-8",
)  # fmt: skip


def other_methods(path: str, own: str = "POST") -> Iterator[Request]:
    """Yield requests without a body by every method that a route does not have."""
    for method in METHODS:
        if method != own:
            yield Request(f"{path} by {method}", method, path)


def every_way(path: str, body: Mapping[str, Any]) -> Iterator[Request]:
    """Yield it by every method, as every content type, as a stream, and for a client that goes."""
    yield from other_methods(path)
    for kind in TYPES:
        yield post(f"as {kind}", path, body, kind)
    streamed = {**body, "stream": True}
    yield post("with stream", path, streamed)
    for reads in (0, 10):
        name, content = f"{path} cut after {reads}", json.dumps(streamed).encode()
        yield Request(name, "POST", path, content, {"Content-Type": JSON}, reads)


def post(name: str, path: str, body: object, kind: str | None = JSON, **headers: str) -> Request:
    """Return a request with that body: bytes as they are, all else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    types = {} if kind is None else {"Content-Type": kind}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(f"{path} {name}", "POST", path, content, types | given)


def _whole() -> Iterator[Request]:
    for path, body in BODIES.items():
        yield post("whole", path, body)
        yield post("adapter", path, {**body, "model": ADAPTER})
        yield post("unknown model", path, {**body, "model": UNKNOWN})
        yield post("no model", path, {name: body[name] for name in body if name != "model"})
        yield post("unknown field", path, {**body, "unheard_of": 1})


def _streams() -> Iterator[Request]:
    for path in STREAMED:
        body = {**BODIES[path], "stream": True}
        yield post("stream", path, body)
        yield post("stream of an adapter", path, {**body, "model": ADAPTER})
        yield post("stream of an unknown model", path, {**body, "model": UNKNOWN})
        yield post("stream, usage", path, {**body, "stream_options": {"include_usage": True}})
        yield post("stream, too long", path, {**body, **_long(path)})
        yield post("stream: yes", path, {**body, "stream": "yes"})
        yield post("stream: 2", path, {**body, "stream": 2})
        yield post("stream: null", path, {**body, "stream": None})
        yield post("stream, wrong field", path, {**body, "temperature": "hot"})
        yield post("stream, own id", path, {**body, "request_id": "mine"})
    for path in HOT:
        body = {**BODIES[path], "stream": True}
        for name, options in OPTIONS.items():
            yield post(f"stream, {name}", path, {**body, **options})


OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "stop": {"stop": ["e"]},
        "two": {"n": 2, "seed": 1},
        "usage so far": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "options alone": {"stream_options": 1},
        "token ids": {"return_token_ids": True},
        "schema": {"response_format": {"type": "json_object"}},
        "echo": {"echo": True},
    }
)


def _long(path: str) -> Mapping[str, Any]:
    if path == "/v1/completions":
        return {"prompt": LONG}
    if path == "/v1/responses":
        return {"input": LONG}
    return {"messages": [{"role": "user", "content": LONG}]}


# Values of fields that two routes have in common: right ones, and such as are refused.
VALUES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "max_tokens 0": {"max_tokens": 0},
        "max_tokens -1": {"max_tokens": -1},
        "max_tokens text": {"max_tokens": "3"},
        "max_tokens words": {"max_tokens": "three"},
        "max_tokens 2.5": {"max_tokens": 2.5},
        "max_tokens 2.0": {"max_tokens": 2.0},
        "max_tokens true": {"max_tokens": True},
        "max_tokens null, stop": {"max_tokens": None, "stop": [" ", "e", "o"]},
        "max_tokens too many": {"max_tokens": 5000},
        "max_tokens 2**63": {"max_tokens": 2**63},
        "max_tokens 2**64": {"max_tokens": 2**64},
        "max_tokens 10**400": {"max_tokens": 10**400},
        "seed 2**63": {"seed": 2**63},
        "seed 2**64": {"seed": 2**64},
        "seed -2**63": {"seed": -(2**63)},
        "seed -2**63-1": {"seed": -(2**63) - 1},
        "temperature -1": {"temperature": -1},
        "temperature text": {"temperature": "hot"},
        "temperature 3": {"temperature": 3, "seed": 1},
        "temperature NaN": {"temperature": float("nan")},
        "temperature Infinity": {"temperature": float("inf")},
        "temperature 1e19": {"temperature": 1e19},
        "top_p 0": {"top_p": 0},
        "top_p 2": {"top_p": 2},
        "top_k -5": {"top_k": -5},
        "n 0": {"n": 0},
        "n 2": {"n": 2, "temperature": 1, "seed": 3},
        "n text": {"n": "two"},
        "stop number": {"stop": 3},
        "stop list of numbers": {"stop": [1]},
        "logit_bias": {"logit_bias": {"5": 1.0}},
        "logit_bias of a word": {"logit_bias": {"word": 1.0}},
        "logit_bias out of vocabulary": {"logit_bias": {"999999": 1.0}},
        "user": {"user": "me"},
        "service_tier": {"service_tier": "auto"},
        "metadata": {"metadata": {"a": "b"}},
        "priority text": {"priority": "high"},
        "priority": {"priority": 3},
        "model number": {"model": 1},
        "model null": {"model": None},
        "model empty": {"model": ""},
        "too long": {},  # of each route its own
        "response_format wrong": {"response_format": {"type": "poem"}},
        "response_format schema": {
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["ab"]}}
            }
        },
        "structured_outputs": {"structured_outputs": {"choice": ["sea", "moon"]}},
        "structured_outputs of two kinds": {
            "structured_outputs": {"choice": ["sea"], "regex": "a+"}
        },
        "structured_outputs wrong": {"structured_outputs": {"regex": "("}},
        "min_tokens above": {"min_tokens": 9},
        "truncate": {"truncate_prompt_tokens": 2},
        "return_token_ids": {"return_token_ids": True},
        "allowed_token_ids none": {"allowed_token_ids": []},
        "bad_words": {"bad_words": ["a"]},
        "cache_salt empty": {"cache_salt": ""},
        "kv_transfer_params": {"kv_transfer_params": {"a": 1}},
        "vllm_xargs": {"vllm_xargs": {"a": 1}},
        "stream_options without stream": {"stream_options": {"include_usage": True}},
        "beam search": {"use_beam_search": True, "n": 2},
    }
)  # fmt: skip
OWN_VALUES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "/v1/completions": {
            "prompt missing": {"prompt": None},
            "prompt number": {"prompt": 1},
            "prompt empty": {"prompt": ""},
            "prompt list": {"prompt": ["Once", "Twice"]},
            "prompt empty list": {"prompt": []},
            "prompt ids": {"prompt": [5, 6, 7]},
            "prompt lists of ids": {"prompt": [[5, 6], [7]]},
            "prompt ids out of vocabulary": {"prompt": [999999]},
            "prompt negative ids": {"prompt": [-1]},
            "prompt huge ids": {"prompt": [2**64]},
            "prompt mixed": {"prompt": ["Once", [5]]},
            "prompt surrogate": {"prompt": "a\ud800b"},
            "prompt null character": {"prompt": "a\x00b"},
            "prompt emoji": {"prompt": "a\U0001f600b"},
            "echo": {"echo": True},
            "echo alone": {"echo": True, "max_tokens": 0},
            "logprobs": {"logprobs": 2},
            "logprobs too many": {"logprobs": 100},
            "logprobs negative": {"logprobs": -3},
            "prompt_logprobs": {"prompt_logprobs": 1},
            "suffix": {"suffix": "end"},
            "best_of": {"best_of": 2},
        },
        "/v1/chat/completions": {
            "messages missing": {"messages": None},
            "messages text": {"messages": "hello"},
            "messages none": {"messages": []},
            "message of no role": {"messages": [{"content": "hello"}]},
            "message of an odd role": {"messages": [{"role": "wizard", "content": "hello"}]},
            "message of a number": {"messages": [{"role": "user", "content": 3}]},
            "message of parts": {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
            },
            "message of an odd part": {
                "messages": [{"role": "user", "content": [{"type": "smell"}]}]
            },
            "message of a picture": {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}],
                    }
                ]
            },
            "message surrogate": {"messages": [{"role": "user", "content": "a\udc00"}]},
            "assistant last": {
                "messages": [USER, {"role": "assistant", "content": "It is"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "continue and generate": {
                "continue_final_message": True, "add_generation_prompt": True
            },
            "tools, none": {"tools": [TOOL], "tool_choice": "none"},
            "tools, auto": {"tools": [TOOL], "tool_choice": "auto"},
            "tools, required": {"tools": [TOOL], "tool_choice": "required"},
            "tools, named": {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "look"}},
            },
            "tools, another named": {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "hear"}},
            },
            "tools wrong": {"tools": [{"type": "hammer"}]},
            "tools empty": {"tools": []},
            "tools number": {"tools": 3},
            "tool_choice alone": {"tool_choice": "required"},
            "logprobs": {"logprobs": True, "top_logprobs": 2},
            "top_logprobs alone": {"top_logprobs": 2},
            "top_logprobs too many": {"logprobs": True, "top_logprobs": 100},
            "max_completion_tokens": {"max_completion_tokens": 2},
            "chat_template": {"chat_template": "{{ messages }}"},
            "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
            "reasoning_effort wrong": {"reasoning_effort": "heroic"},
            "structured_outputs on which validators fail": {"structured_outputs": 0.5},
            "structured_outputs on which validators fail, with a huge number": {
                "structured_outputs": 0.5, "seed": 2**63,
            },
            "tools with a huge number": {
                "tools": [{"type": "function", "function": {
                    "name": "look", "parameters": {"const": 2**70}}}],
                "tool_choice": "none",
            },
        },
        "/v1/responses": {
            "input missing": {"input": None},
            "input list": {"input": [{"role": "user", "content": "Hello"}]},
            "input number": {"input": 3},
            "temperature NaN": {"temperature": float("nan")},
            "max_output_tokens 0": {"max_output_tokens": 0},
            "previous": {"previous_response_id": "resp_none"},
            "background": {"background": True},
            "not stored": {"store": False},
        },
        "/v1/messages": {
            "system": {"system": "Be short."},
            "system list": {"system": [{"type": "text", "text": "Be short."}]},
            "max_tokens missing": {"max_tokens": None},
            "max_tokens 0": {"max_tokens": 0},
            "messages text": {"messages": "hello"},
            "message of an odd role": {"messages": [{"role": "wizard", "content": "hello"}]},
            "tools": {
                "tools": [{"name": "look", "input_schema": SCHEMA}],
                "tool_choice": {"type": "none"},
            },
            "tools wrong": {"tools": [{"name": 3}]},
            "stop_sequences": {"stop_sequences": ["e"]},
            "temperature NaN": {"temperature": float("nan")},
        },
        "/tokenize": {
            "prompt missing": {"prompt": None},
            "messages": {"messages": [USER]},
            "strings": {"return_token_strs": True},
            "without special tokens": {"add_special_tokens": False},
        },
        "/detokenize": {
            "tokens text": {"tokens": "x"},
            "tokens out of vocabulary": {"tokens": [999999]},
            "tokens negative": {"tokens": [-1]},
            "tokens huge": {"tokens": [2**64]},
            "tokens none": {"tokens": []},
        },
        "/generative_scoring": {
            "items missing": {"items": None},
            "labels out of vocabulary": {"label_token_ids": [999999]},
            "labels missing": {"label_token_ids": []},
        },
    }
)  # fmt: skip


def _fields() -> Iterator[Request]:
    for path in HOT:
        for name, values in VALUES.items():
            own = _long(path) if name == "too long" else values
            yield post(name, path, {**BODIES[path], **own})
    for path, cases in OWN_VALUES.items():
        for name, values in cases.items():
            yield post(f"own {name}", path, {**BODIES[path], **values})


# Bodies that are no object, or no JSON, or JSON that only some parsers read.
CONTENTS: Final[Mapping[str, bytes]] = MappingProxyType(
    {
        "empty": b"",
        "blank": b" ",
        "cut": b"{",
        "half": b'{"model": "lmi", "prompt": "a',
        "list": b"[]",
        "list of objects": b'[{"a": 1}]',
        "text": b'"text"',
        "null": b"null",
        "number": b"1",
        "true": b"true",
        "object": b"{}",
        "not json": b"prompt=hello",
        "single quotes": b"{'a': 1}",
        "trailing comma": b'{"a": 1,}',
        "trailing text": b'{"a": 1} x',
        "two objects": b'{"a": 1}{"b": 2}',
        "comment": b'{"a": 1} // x',
        "bare key": b"{a: 1}",
        "control character": b'{"a": "\x01"}',
        "line break in a text": b'{"a": "x\ny"}',
        "bad escape": b'{"a": "\\x"}',
        "not UTF-8": b'{"a": "\xff"}',
        "latin-1": '{"a": "é"}'.encode("latin-1"),
        "leading zero": b'{"a": 01}',
        "plus": b'{"a": +1}',
        "hexadecimal": b'{"a": 0x1}',
        "true as Python's": b'{"a": True}',
        "nan": b'{"a": nan}',
        "deep": b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}",
        "deep, unclosed": b"[" * 100_000,
        "digits beyond Python's": b'{"a": ' + b"1" * 5000 + b"}",
    }
)
# The same of a request that is fine otherwise: `%b` is its object without the braces.
AROUND: Final[Mapping[str, bytes]] = MappingProxyType(
    {
        "byte order mark": b"\xef\xbb\xbf{%b}",
        "NaN beside": b'{%b, "unheard_of": NaN}',
        "-Infinity beside": b'{%b, "unheard_of": -Infinity}',
        "1e999 beside": b'{%b, "unheard_of": 1e999}',
        "huge number beside": b'{%b, "unheard_of": 123456789012345678901234567890}',
        "surrogate beside": b'{%b, "user": "\\ud800"}',
        "surrogate pair beside": b'{%b, "user": "\\ud83d\\ude00"}',
        "model twice": b'{"model": "unheard-of", %b}',
        "white space": b" \r\n\t{ %b } \n",
        "null byte after": b"{%b}\x00",
        "deep beside": b'{%b, "unheard_of": ' + b"[" * 500 + b"]" * 500 + b"}",
        "wide beside": b'{%b, "unheard_of": [' + b'"",' * 32_768 + b'""]}',
        "many beside": b"{%b" + b"".join(b', "f%d": 1' % number for number in range(1024)) + b"}",
    }
)


def _contents() -> Iterator[Request]:
    for path in BODIES:
        few = {name: CONTENTS[name] for name in ("empty", "cut", "list", "object", "not UTF-8")}
        for name, content in (CONTENTS if path in STREAMED else few).items():
            yield post(f"body {name}", path, content)
    for path in STREAMED:
        inside = json.dumps(BODIES[path])[1:-1].encode()
        for name, form in AROUND.items():
            yield post(f"body {name}", path, form.replace(b"%b", inside))
        for code in ("utf-16", "utf-32-be"):
            yield post(f"body {code}", path, json.dumps(BODIES[path]).encode(code))
        packed = gzip.compress(json.dumps(BODIES[path]).encode(), mtime=0)
        yield post("body packed", path, packed, Content_Encoding="gzip")


KINDS: Final = (
    None, "", "application/json; charset=utf-8", "application/json;charset=latin-1",
    "APPLICATION/JSON", "application/json ", "text/plain", "text/json", "text/csv",
    "application/xml", "application/octet-stream", "application/x-www-form-urlencoded",
    "multipart/form-data", "multipart/form-data; boundary=x", "application/vnd.api+json",
    "application/jsonlines", "json", "*/*", "application/json, text/plain",
)  # fmt: skip


def _content_types() -> Iterator[Request]:
    for path in HOT:
        for kind in KINDS:
            yield post(f"as {kind}", path, BODIES[path], kind)
    for path, body in BODIES.items():
        if path not in STREAMED:
            yield from every_way(path, body)
        elif path not in HOT:
            yield from (post(f"as {kind}", path, body, kind) for kind in TYPES)


def _methods() -> Iterator[Request]:
    for path in STREAMED:
        yield from other_methods(path)
    for path in (*READ[:3], "/kv_event_sources", "/v1/responses/resp_none"):
        yield from other_methods(path, "GET")
    yield from other_methods("/v1/responses/resp_none/cancel")
    for path in HOT:
        content = json.dumps(BODIES[path]).encode()
        headers = {"Content-Type": JSON}
        yield Request(f"{path} put", "PUT", path, content, headers)
        yield Request(f"{path} by TRACE", "TRACE", path)
        yield Request(f"{path} by BREW", "BREW", path)
    yield Request("/v1/models posted", "POST", "/v1/models", b"{}", {"Content-Type": JSON})


def _paths() -> Iterator[Request]:
    for path, body in BODIES.items():
        yield post("slash", f"{path}/", body)
    for path in HOT:
        body = BODIES[path]
        yield post("query", f"{path}?a=b&model=unheard-of", body)
        yield post("two slashes", f"{path}//", body)
        yield post("slash and query", f"{path}/?a=b", body)
        yield post("in front", f"/{path}", body)
        yield post("capitals", path.upper(), body)
        yield post("quoted", path.replace("completions", "%63ompletions"), body)
        yield post("slash quoted", path.replace("/v1/", "/v1%2F"), body)
        yield post("dots", path.replace("/v1/", "/v1/../v1/"), body)
        yield post("below", f"{path}/nothing", body)
        yield post("without /v1", path.removeprefix("/v1"), body)
    for path in (
        "/v1/models/",
        "/version/",
        "/load/",
        "/v1/",
        "/v1",
        "/v2/nothing",
        "/v1/models/x",
    ):
        yield Request(f"GET {path}", "GET", path)


def _ids() -> Iterator[Request]:
    for path, body in BODIES.items():
        yield post("id in the header", path, body, X_Request_Id="given")
        yield post("id in the body", path, {**body, "request_id": "mine"})
        yield post("id twice", path, {**body, "request_id": "mine"}, X_Request_Id="given")
    for path in HOT:
        yield post("id of a number", path, {**BODIES[path], "request_id": 3})
        yield post("id empty", path, {**BODIES[path], "request_id": ""})
        yield post("id with spaces", path, BODIES[path], X_Request_Id="a b")


def _origins() -> Iterator[Request]:
    preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    for path in (*HOT, "/v1/messages", "/v1/models", "/nothing"):
        yield Request(f"{path} preflight", "OPTIONS", path, None, preflight)
    headers = {"Access-Control-Request-Headers": "content-type, authorization"}
    yield Request("preflight, headers", "OPTIONS", HOT[0], None, preflight | headers)
    for path in (*HOT, "/v1/messages"):
        yield post(
            "origin", path, BODIES[path], Origin="http://a.example", Sec_Fetch_Site="same-origin"
        )


def _readers() -> Iterator[Request]:
    for path in READ:
        yield Request(f"GET {path}", "GET", path)
    yield Request("GET with a body", "GET", "/v1/models", b"{}", {"Content-Type": JSON})
    yield Request("GET a response", "GET", "/v1/responses/resp_none")
    yield Request("GET a response's stream", "GET", "/v1/responses/resp_none?stream=true")
    yield Request("cancel a response", "POST", "/v1/responses/resp_none/cancel")
    yield Request("POST /nothing", "POST", "/nothing", b"{}", {"Content-Type": JSON})
    yield Request("POST /v1/nothing", "POST", "/v1/nothing", b"{}", {"Content-Type": JSON})
    yield post("accept html", HOT[0], TEXT, Accept="text/html")
    yield post("accept nothing", HOT[0], TEXT, Accept="")
    yield post("beta", "/v1/messages", CHAT, anthropic_version="2023-06-01")


def _cut() -> Iterator[Request]:
    for path in STREAMED:
        body = {**BODIES[path], "stream": True, "max_tokens": 4}
        content = json.dumps(body).encode()
        for reads in (0, 10):
            name = f"{path} cut after {reads}"
            yield Request(name, "POST", path, content, {"Content-Type": JSON}, reads)


def _invocations() -> Iterator[Request]:
    path = "/invocations"
    yield post("chat", path, CHAT)
    yield post("prompt", path, TEXT)
    yield post("chat stream", path, {**CHAT, "stream": True})
    yield post("prompt embeddings", path, {"model": MODEL, "prompt_embeds": "AA=="})
    yield post("nothing known", path, {"model": MODEL})


def _own() -> Iterator[Request]:
    for method, path in OWN:
        body = b"{}" if method == "POST" and path != "/ping" else None
        yield Request(f"own route {method} {path}", method, path, body, {"Content-Type": JSON})
