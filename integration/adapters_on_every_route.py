"""Each route that takes a `model` is answered by the adapter of that name, and by no other.

Which routes there are is read from the server's own description, so that a new one is missed here.
"""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Final

import pytest

from integration.client import call
from integration.compared_requests import BODIES, STREAMED
from integration.compared_switches import SWITCHED
from integration.comparison import comparable
from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
NAMES: Final = ("lmi", "capitals", "json")  # the model, and the adapters that are loaded at start
ALL: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType({**BODIES, **SWITCHED})
GENERATE: Final = "/inference/v1/generate"
COHERE: Final = "/cohere/v2/chat"
STREAMS: Final = (*STREAMED, COHERE, GENERATE)
# The others read or make a prompt, or say that the model cannot do it: by name, without weights.
WEIGHED: Final = (*STREAMS, "/v1/chat/completions/batch", "/generative_scoring")
# Of a model this small the likeliest token may be the same: its probability is not.
ONE_TOKEN: Final = {"sampling_params": {"max_tokens": 1, "temperature": 0, "logprobs": 1}}
OUR_KEY: Final = re.compile(rb"[0-9a-f]{32}-\d+")  # the name of an adapter inside of the server


def _models(url: str) -> set[str]:
    """Return the paths whose body may have a `model`, by the server's description of itself."""
    document = call(url, "/openapi.json").json()
    schemas = document["components"]["schemas"]

    def has_model(schema: Mapping[str, Any]) -> bool:
        parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
        if reference := schema.get("$ref"):
            parts.append(schemas[reference.rpartition("/")[2]])
        return "model" in schema.get("properties", {}) or any(map(has_model, parts))

    return {
        path
        for path, item in document["paths"].items()
        for kind in item.get("post", {}).get("requestBody", {}).get("content", {}).values()
        if has_model(kind["schema"])
    }


def test_each_route_that_takes_a_model_is_asked(tgi_server: RunningServer) -> None:
    """Whatever the application has: `/invocations` and its like have tests of their own."""
    found = _models(tgi_server.url)
    assert len(found) > 15
    own = r"invo|predictions|^/$|generate(_stream)?$|^/chat_tokenize$"
    ours = {path for path in found if re.search(own, path)}
    assert found - ours - {GENERATE} == ALL.keys() - {GENERATE}


STREAM_TRIES = 8


@pytest.mark.parametrize(
    ("path", "is_streamed"),
    [*((path, False) for path in ALL), *((path, True) for path in STREAMS)],
)
def test_adapter_of_that_name_answers(
    tgi_server: RunningServer, path: str, is_streamed: bool
) -> None:
    """Alone, and in one batch with the base model and another adapter."""
    body = {**ALL[path], **({"stream": True} if is_streamed else {})}
    if path == GENERATE:
        body |= ONE_TOKEN
    if path == COHERE:  # of a longer stream vLLM joins what a busy server has not sent yet
        body |= {"max_tokens": 1}

    def asked(name: str) -> tuple[int, bytes]:
        answer = call(tgi_server.url, path, {**body, "model": name})
        return answer.status, comparable(answer.body)

    # Streams again: on a busy machine vLLM joins tokens. Whole answers are compared at once.
    for _ in range(STREAM_TRIES if is_streamed else 1):
        alone = [asked(name) for name in NAMES]
        with ThreadPoolExecutor(len(NAMES)) as pool:
            together = list(pool.map(asked, NAMES * 2))
        if together == alone * 2:
            break
    assert together == alone * 2
    bodies = {answer.replace(json.dumps(name).encode(), b"NAME") for name, (_, answer) in
              zip(NAMES, alone, strict=True)}  # fmt: skip
    assert not any(OUR_KEY.search(answer) for answer in bodies)
    if path in WEIGHED:
        assert {status for status, _ in alone} == {200}
        assert len(bodies) == len(NAMES)
    else:
        assert len({status for status, _ in alone}) == 1
