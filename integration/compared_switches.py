"""Requests for the routes that vLLM has with a switch, or with another model than a generating one.

Those of `--enable-scale-out`, Cohere's chat, `/tokenizer_info`, what acts on the server
(`VLLM_SERVER_DEV_MODE`), keys, pages of other sites, a path prefix, sounds, and classes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from integration.compared_requests import (
    ADAPTER,
    BATCH,
    BODIES,
    CHAT,
    CONTENTS,
    JSON,
    LONG,
    MODEL,
    RESPONSE,
    TEXT,
    TOOL,
    UNKNOWN,
    USER,
    Request,
    every_way,
    other_methods,
    post,
)

KEY: Final = "sesame-open"
ORIGIN: Final = "https://a.example"
OTHER_ORIGIN: Final = "https://b.example"
STRANGE_ORIGIN: Final = "https://c.example"
PREFIX: Final = "/api"
IDS: Final = [5, 6, 7]
GENERATE: Final = {
    "token_ids": IDS, "model": MODEL, "sampling_params": {"max_tokens": 3, "temperature": 0},
}  # fmt: skip
# Of more vLLM joins as many as it finds.
ONE_TOKEN: Final = {"stream": True, "sampling_params": {"max_tokens": 1, "temperature": 0}}
GENERATED: Final = {
    "request_id": "x",
    "choices": [{"index": 0, "token_ids": IDS, "finish_reason": "length"}],
}
CHUNK: Final = {"request_id": "x", "choices": [{"index": 0, "token_ids": IDS}]}
SWITCHED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "/v1/chat/completions/render": CHAT,
        "/v1/completions/render": TEXT,
        "/v1/messages/render": CHAT,
        "/v1/responses/render": RESPONSE,
        "/v1/chat/completions/derender": {"generate_response": GENERATED, "model": MODEL},
        "/v1/completions/derender": {"generate_responses": [GENERATED], "model": MODEL},
        "/inference/v1/generate": GENERATE,
        "/cohere/v2/chat": CHAT,
        "/cohere/v2/chat/render": CHAT,
    }
)  # fmt: skip
SWITCHED_VALUES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "/v1/chat/completions/render": {
            "stream": {"stream": True},
            "tools": {"tools": [TOOL], "tool_choice": "auto"},
            "two": {"n": 2},
            "messages none": {"messages": []},
            "messages missing": {"messages": None},
            "max_tokens 0": {"max_tokens": 0},
            "too long": {"messages": [{"role": "user", "content": LONG}]},
        },
        "/v1/completions/render": {
            "stream": {"stream": True},
            "prompts": {"prompt": ["Once", "Twice"]},
            "ids": {"prompt": IDS},
            "ids out of vocabulary": {"prompt": [999999]},
            "prompt missing": {"prompt": None},
            "too long": {"prompt": LONG},
            "logprobs": {"logprobs": 2},
        },
        "/v1/messages/render": {
            "system": {"system": "Be short."},
            "max_tokens missing": {"max_tokens": None},
        },
        "/v1/responses/render": {
            "input list": {"input": [USER]},
            "input missing": {"input": None},
        },
        "/v1/chat/completions/derender": {
            "stream": {"stream": True, "generate_chunk": CHUNK},
            "stream without a chunk": {"stream": True},
            "prompt": {"prompt_tokens": 3, "prompt_token_ids": IDS},
            "request": {"chat_request": CHAT},
            "response missing": {"generate_response": None},
            "ids out of vocabulary": {
                "generate_response": {**GENERATED, "choices": [{"index": 0, "token_ids": [999999]}]}
            },
            "negative ids": {
                "generate_response": {**GENERATED, "choices": [{"index": 0, "token_ids": [-1]}]}
            },
            "no choices": {"generate_response": {**GENERATED, "choices": []}},
        },
        "/v1/completions/derender": {
            "stream": {"stream": True, "generate_chunk": CHUNK},
            "counts of another length": {"prompt_tokens": [1, 2]},
            "request": {"completion_request": TEXT},
            "responses missing": {"generate_responses": None},
        },
        "/inference/v1/generate": {
            "stream": {**ONE_TOKEN},
            "stream of an adapter": {**ONE_TOKEN, "model": ADAPTER},
            "stream, usage": {**ONE_TOKEN, "stream_options": {"include_usage": True}},
            "stream, text": {**ONE_TOKEN, "output_mode": "text"},
            "text": {"output_mode": "text"},
            "odd mode": {"output_mode": "poem"},
            "logprobs": {"sampling_params": {"max_tokens": 2, "temperature": 0, "logprobs": 1}},
            "two": {"sampling_params": {"max_tokens": 2, "n": 2, "seed": 1}},
            "no ids": {"token_ids": []},
            "ids of text": {"token_ids": ["a"]},
            "ids out of vocabulary": {"token_ids": [999999]},
            "negative ids": {"token_ids": [-1]},
            "ids missing": {"token_ids": None},
            "too many ids": {"token_ids": IDS * 1000},
            "sampling missing": {"sampling_params": None},
            "sampling wrong": {"sampling_params": {"temperature": -1}},
            "sampling unknown": {
                "sampling_params": {"max_tokens": 2, "temperature": 0, "unheard_of": 1}
            },
            "own id": {"request_id": "mine"},
            "priority": {"priority": 3},
        },
        "/cohere/v2/chat": {
            "stream": {"stream": True},
            "stream of an adapter": {"stream": True, "model": ADAPTER},
            "stream of an unknown model": {"stream": True, "model": UNKNOWN},
            "stream, too long": {
                "stream": True, "messages": [{"role": "user", "content": LONG}]
            },
            "messages missing": {"messages": None},
            "messages none": {"messages": []},
            "message of an odd role": {"messages": [{"role": "wizard", "content": "hello"}]},
            "stop_sequences": {"stop_sequences": ["e"]},
            "temperature text": {"temperature": "hot"},
            "temperature -1": {"temperature": -1},
            "max_tokens 0": {"max_tokens": 0},
            "p": {"p": 0.5, "k": 3, "seed": 1},
            "p 2": {"p": 2},
            "tools": {"tools": [TOOL], "tool_choice": "NONE"},
            "logprobs": {"logprobs": True},
        },
    }
)  # fmt: skip
GENERATING: Final = "/inference/v1/generate"
ODD_BODIES: Final = ("empty", "cut", "list", "object", "not UTF-8", "null", "deep")


def switched_requests() -> tuple[Request, ...]:
    """Return every request to a model that generates, with every switch on, and with the key."""
    found = (*map(_with_id, _routes()), *_origins(), *_prefixed(), *_guarded())
    unknown = {**CHAT, "model": UNKNOWN}
    return tuple(map(_with_key, (*found, post("no id", "/cohere/v2/chat", unknown))))


def keyless_requests() -> tuple[Request, ...]:
    """Return requests to the same servers without their key, or with a wrong one."""
    found = [post("no key", path, body) for path, body in BODIES.items()]
    found += [post("no key", path, body) for path, body in SWITCHED.items()]
    found += [
        post("wrong key", path, BODIES[path], Authorization="Bearer wrong")
        for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/tokenize")
    ]
    found += [
        Request(f"GET {path} no key", "GET", path)
        for path in ("/v1/models", "/version", "/load", "/health", "/metrics", "/v1/nothing")
    ]
    found.append(post("another scheme", "/v1/completions", TEXT, Authorization=f"Basic {KEY}"))
    found.append(Request("OPTIONS, no key", "OPTIONS", "/v1/completions"))
    return tuple(found)


def _with_key(request: Request) -> Request:
    return replace(request, headers={"Authorization": f"Bearer {KEY}", **request.headers})


def _with_id(request: Request) -> Request:
    """Name the request, where errors say its name."""
    if not request.path.startswith("/cohere"):
        return request
    return replace(request, headers={"X-Request-Id": "given", **request.headers})


def _routes() -> Iterator[Request]:
    for path, body in SWITCHED.items():
        yield post("whole", path, body)
        yield post("adapter", path, {**body, "model": ADAPTER})
        yield post("unknown model", path, {**body, "model": UNKNOWN})
        yield post("no model", path, {name: body[name] for name in body if name != "model"})
        yield post("model null", path, {**body, "model": None})
        yield post("unknown field", path, {**body, "unheard_of": 1})
        yield post("slash", f"{path}/", body)
        yield post("id in the header", path, body, X_Request_Id="given")
        for name, values in SWITCHED_VALUES.get(path, {}).items():
            yield post(f"own {name}", path, {**body, **values})
        yield from _odd(path, body)
    yield Request("GET /tokenizer_info", "GET", "/tokenizer_info")
    yield from other_methods("/tokenizer_info", "GET")


def _odd(path: str, body: Mapping[str, Any]) -> Iterator[Request]:
    """Bodies that are none, other types and methods, and a client that disconnects."""
    for name in ODD_BODIES:
        yield post(f"body {name}", path, CONTENTS[name])
    yield from every_way(path, {**body, **ONE_TOKEN} if path == GENERATING else body)


def _origins() -> Iterator[Request]:
    """What a browser asks for the page of a site that is invited, and of one that is not."""
    path = "/v1/completions"
    for name, origin in (
        ("invited", ORIGIN),
        ("also invited", OTHER_ORIGIN),
        ("strange", STRANGE_ORIGIN),
    ):
        for method in ("POST", "GET", "DELETE"):
            asked = {"Origin": origin, "Access-Control-Request-Method": method}
            yield Request(f"asked by {name}, {method}", "OPTIONS", path, None, asked)
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        for headers in ("content-type", "x-mine, Content-Type", "x-yours"):
            more = {"Access-Control-Request-Headers": headers}
            yield Request(f"asked by {name}, with {headers}", "OPTIONS", path, None, asked | more)
        site = {"Origin": origin, "Sec_Fetch_Site": "same-origin"}  # else ours refuses it
        yield post(f"from {name}", path, TEXT, **site)
        yield post(f"from {name}, stream", path, {**TEXT, "stream": True}, **site)
        yield post(f"from {name}, refused", path, {**TEXT, "max_tokens": -1}, **site)
        yield post(f"from {name}", "/v1/messages", CHAT, **site)
    yield Request("options without an origin", "OPTIONS", path)


def _prefixed() -> Iterator[Request]:
    """The prefix of `--root-path` in front, which a proxy may leave there."""
    for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        body = BODIES[path]
        yield post("whole", f"{PREFIX}{path}", body)
        yield post("wrong", f"{PREFIX}{path}", {**body, "model": UNKNOWN})
        yield post("slash", f"{PREFIX}{path}/", body)
    yield post("stream", f"{PREFIX}/v1/completions", {**TEXT, "stream": True})
    yield post("prefix twice", f"{PREFIX}{PREFIX}/v1/completions", TEXT)
    yield post("no such route", f"{PREFIX}lication/v1/completions", TEXT)
    for path in ("/v1/models", "/version", "/health", "/nothing", "", "/"):
        yield Request(f"GET {PREFIX}{path}", "GET", f"{PREFIX}{path}")


def _guarded() -> Iterator[Request]:
    """What acts on the server: what is malformed, or leaves it as it is."""
    for path in READING:
        yield Request(f"GET {path}", "GET", path)
        yield Request(f"POST {path}", "POST", path, b"{}", {"Content-Type": JSON})
    for path in (*READING, "/server_info"):
        yield from other_methods(path, "GET")
    for path in (*ACTING, *REPEATABLE, *CHANGING):
        yield from other_methods(path)
    yield Request("GET /get_world_size?include_dp=false", "GET", "/get_world_size?include_dp=false")
    yield Request("GET /get_world_size?include_dp=x", "GET", "/get_world_size?include_dp=x")
    yield Request("GET /server_info", "GET", "/server_info")
    yield Request("GET /server_info?config_format=x", "GET", "/server_info?config_format=x")
    for path in REPEATABLE:
        yield post("done", path, {})
    yield post("wrong", "/sleep?level=x", {})
    yield post("wrong", "/pause?mode=x", {})
    for path, bodies in ACTING.items():
        for number, body in enumerate(bodies):
            yield post(f"{number}", path, body)
    for method in ("no_such_method", 3):
        yield post(f"of no method: {method}", "/collective_rpc", {"method": method})


READING: Final = ("/is_sleeping", "/is_paused", "/get_world_size", "/weight_info")
# What leaves a server as it was: of weights none is under way.
REPEATABLE: Final = (
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/wake_up", "/resume",
    "/is_scaling_elastic_ep", "/start_weight_update", "/start_draft_weight_update",
    "/finish_weight_update", "/shutdown_weight_transfer_engine", "/release_kv_cache_memory",
    "/stop_profile",
)  # fmt: skip
CHANGING: Final = ("/sleep", "/pause")  # in `SEQUENCES`
ACTING: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "/collective_rpc": (
            {}, b"{", [], {"method": "check_health"},
        ),
        "/update_weights": ({}, b"{", {"update_info": 3}),
        "/init_weight_transfer_engine": ({}, {"init_info": 3}),
        "/update_weight_version": ({}, {"new_version": 3}),
        "/weight_checker": ({}, {"action": "dance"}, {"action": "compare"}, {"action": "checksum"}),
        "/abort_requests": ({}, b"{", [], {"request_ids": ["none"]}),
        "/inference/v1/abort_requests": ({}, b"{", {"request_ids": ["none"]}),
        "/scale_elastic_ep": ({}, b"{", {"new_data_parallel_size": "x"}),
        "/start_profile": (
            b"{", [], {"profile_prefix": 3}, {"profile_prefix": "../x"},
            {"delay_iterations": "x"}, {"delay_iterations": -1}, {"max_iterations": -1},
        ),
    }
)  # fmt: skip
# A profile that waits for so many steps is started and stopped, and never written: vLLM's own
# server needs more than a minute to write one.
PROFILER: Final = json.dumps(
    {"profiler": "torch", "torch_profiler_dir": "/nowhere", "delay_iterations": 10**9}
    | {"ignore_frontend": True}
)
# What changes the state of a server is asked of both in this order, and is undone at its end.
SEQUENCES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = MappingProxyType(
    {
        "sleep": (
            ("POST", "/sleep?level=1"), ("GET", "/is_sleeping"), ("POST", "/wake_up"),
            ("GET", "/is_sleeping"),
        ),
        "pause": (
            ("POST", "/pause"), ("GET", "/is_paused"), ("POST", "/resume"), ("GET", "/is_paused"),
        ),
        "pause, keep": (("POST", "/pause?mode=keep"), ("GET", "/is_paused"), ("POST", "/resume")),
        "profile": (
            ("POST", "/start_profile"), ("POST", "/start_profile"), ("POST", "/stop_profile"),
            ("POST", "/stop_profile"), ("POST", "/start_profile"), ("POST", "/stop_profile"),
        ),
    }
)  # fmt: skip


def sequence(name: str) -> tuple[Request, ...]:
    """Return the requests of a sequence, each under a name of its own."""
    return tuple(
        _with_key(Request(f"{name} {number}: {path}", method, path))
        for number, (method, path) in enumerate(SEQUENCES[name])
    )


def _coded_name(number: int, method: str, path: str, body: bytes | None) -> str:
    stream = " stream" if b'"stream": true' in (body or b"") else ""
    return f"code {number}: {method} {path}{stream}"


def coded_requests() -> tuple[Request, ...]:
    """Return requests to servers with code for SageMaker's library in their application."""
    asked = (
        ("GET", "/ping", None), ("HEAD", "/ping", None), ("POST", "/ping", b""),
        ("POST", "/invocations", b'{"a": 1}'), ("POST", "/invocations", b"{"),
        ("GET", "/invocations", None), ("GET", "/version", None), ("GET", "/v1/completions", None),
        *(
            ("POST", path, json.dumps(body).encode())
            for path, whole in BODIES.items()
            for body in (whole, {**whole, "stream": True}, {"model": MODEL})
            if path != BATCH or body.get("stream") is not True  # a difference, also without code
        ),
    )  # fmt: skip
    return tuple(
        Request(_coded_name(number, method, path, body), method, path, body, {"Content-Type": JSON})
        for number, (method, path, body) in enumerate(asked)
    )


# The fields of a form with a sound, beside the file.
HEARD: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "whole": {},
        "text": {"response_format": "text"},
        "verbose": {"response_format": "verbose_json"},
        "subtitles": {"response_format": "srt"},
        "odd format": {"response_format": "poem"},
        "stream": {"stream": "true"},
        "stream, usage": {"stream": "true", "stream_include_usage": "true"},
        "stream: perhaps": {"stream": "perhaps"},
        "language": {"language": "en"},
        "odd language": {"language": "klingon"},
        "prompt": {"prompt": "a hum"},
        "temperature text": {"temperature": "hot"},
        "unknown model": {"model": UNKNOWN},
        "seed": {"seed": "1"},
    }
)
BOUNDARY: Final = "x-boundary-x"


def form(fields: Mapping[str, str], sound: bytes | None) -> bytes:
    """Return a multipart body."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if sound is not None:
        head = 'Content-Disposition: form-data; name="file"; filename="a.wav"'
        parts.append(f"--{BOUNDARY}\r\n{head}\r\nContent-Type: audio/wav\r\n\r\n".encode())
        parts.append(sound + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def heard_requests(sound: bytes) -> tuple[Request, ...]:
    """Return every request to a model that hears; `sound` is a WAV file."""
    return tuple(_heard(sound))


def _heard(sound: bytes) -> Iterator[Request]:
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    types = {"Content-Type": kind}
    base = {"model": MODEL, "temperature": "0", "max_completion_tokens": "4"}
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        for name, fields in HEARD.items():
            yield post(name, path, form(base | fields, sound), kind)
        unnamed = {name: base[name] for name in base if name != "model"}
        yield post("no model", path, form(unnamed, sound), kind)
        yield post("no file", path, form(base, None), kind)
        yield post("file of text", path, form(base, b"no sound"), kind)
        yield post("empty file", path, form(base, b""), kind)
        yield post("no boundary", path, form(base, sound), "multipart/form-data")
        yield post("form cut", path, form(base, sound)[:400], kind)
        yield post("id in the header", path, form(base, sound), kind, X_Request_Id="given")
        yield post("as JSON", path, {"model": MODEL, "file": "a"})
        yield post("no body", path, b"", None)
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            yield post(f"as {kind}", path, form(base, sound), kind)
        yield from other_methods(path)
        streamed = form(base | {"stream": "true"}, sound)
        for reads in (0, 10):
            yield Request(f"{path} cut after {reads}", "POST", path, streamed, types, reads)
    for path in ("/v1/completions", "/v1/chat/completions"):
        yield post("no such route", path, BODIES[path])


CLASSED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "/classify": {"input": "rain", "model": MODEL},
        "/pooling": {"input": "rain", "model": MODEL, "task": "classify"},
        "/score": {"text_1": "rain", "text_2": ["sea", "sun"], "model": MODEL},
        "/v1/score": {"queries": "rain", "items": ["sea", "sun"], "model": MODEL},
        "/rerank": {"query": "rain", "documents": ["sea", "rain"], "model": MODEL},
        "/v1/rerank": {"query": "rain", "documents": ["sea", "rain"], "model": MODEL},
        "/v2/rerank": {"query": "rain", "documents": ["sea"], "top_n": 1, "model": MODEL},
    }
)
CLASSED_VALUES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "/classify": {
            "list": {"input": ["rain", "sea"]},
            "ids": {"input": IDS},
            "number": {"input": 3},
            "input missing": {"input": None},
            "empty list": {"input": []},
            "empty text": {"input": ""},
            "not activated": {"use_activation": False},
            "removed field": {"activation": False},
            "truncated": {"truncate_prompt_tokens": 2},
            "priority": {"priority": 1},
            "messages": {"input": None, "messages": [USER]},
        },
        "/score": {
            "lists of other lengths": {"text_1": ["a", "b", "c"], "text_2": ["a", "b"]},
            "text missing": {"text_2": None},
        },
        "/rerank": {
            "no documents": {"documents": []},
            "top_n 0": {"top_n": 0},
            "top_n 9": {"top_n": 9},
            "query missing": {"query": None},
        },
    }
)


def classed_requests() -> tuple[Request, ...]:
    """Return every request to a model that classifies pairs."""
    found = []
    for path, body in CLASSED.items():
        found += [
            post("whole", path, body),
            post("unknown model", path, {**body, "model": UNKNOWN}),
            post("unknown field", path, {**body, "unheard_of": 1}),
            post("not an object", path, [body]),
            post("slash", f"{path}/", body),
            post("id in the header", path, body, X_Request_Id="given"),
            *every_way(path, body),
        ]
        found += [post(f"body {name}", path, CONTENTS[name]) for name in ("cut", "object")]
        found += [
            post(f"own {name}", path, {**body, **values})
            for name, values in CLASSED_VALUES.get(path, {}).items()
        ]
    found.append(post("no such route", "/v1/embeddings", {"input": "rain", "model": MODEL}))
    return tuple(found)
