"""An error repeats no field of megabytes, on any route, and neither does the log."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from integration.client import call
from integration.conftest import RunningServer, running_server

pytestmark = pytest.mark.vllm
SIZE: Final = 3 << 20
MOST: Final = 12 << 10  # bytes: 8,192 characters of the text, and what is around them
LONG: Final = "v" * SIZE
SHAPES: Final[dict[str, Any]] = {
    "text": LONG,
    "list": [LONG],
    "values": {"a": {"b": LONG}},
    "key": {LONG: 1},
    "number": 10**4000,
}
CHAT: Final = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TENSOR: Final = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}
Made = Callable[[str, Any], dict[str, Any]]
LMI: Final[Made] = lambda name, value: {"inputs": "hi", "parameters": {name: value}}  # noqa: E731
# Of each route: a body, and the fields that are put into it.
ROUTES: Final[dict[str, tuple[dict[str, Any] | Made, tuple[str, ...]]]] = {
    "/v1/chat/completions": (CHAT, ("model", "logit_bias", "adapters", "tool_choice", "stop")),
    "/v1/completions": ({"prompt": "hi"}, ("model", "logprobs", "logit_bias", "adapters")),
    "/v1/responses": ({"input": "hi"}, ("model", "metadata", "previous_response_id", "tools")),
    "/v1/messages": (CHAT, ("model", "tools", "thinking")),
    "/invocations": (LMI, ("adapter_id", "adapters", "seed", "top_k", "structured_outputs")),
    "/generate": (LMI, ("adapter_id", "grammar", "seed", "truncate")),
    "/v2/models/lmi/infer": ({"inputs": [TENSOR]}, ("parameters", "outputs", "inputs")),
    "/inference/v1/generate": ({"token_ids": [5], "sampling_params": {}}, ("model", "features")),
    "/tokenize": ({"prompt": "hi"}, ("model", "prompt", "add_special_tokens")),
    "/adapters": ({"name": "a", "src": "/nowhere"}, ("name", "src", "pin")),
    "/v1/load_lora_adapter": ({"lora_name": "a", "lora_path": "/b"}, ("lora_name", "lora_path")),
    "/models": ({"url": "/nowhere"}, ("url", "model_name")),
}
ROWS: Final = [(path, name) for path, (_, names) in ROUTES.items() for name in names]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model with adapters and with the routes for token ids."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    environ = {"OPTION_ENABLE_LORA": "true", "OPTION_ENABLE_SCALE_OUT": "true"}
    with running_server(tmp_path_factory.mktemp("short"), "--demo", environ=environ) as server:
        yield server


@pytest.mark.parametrize(("path", "name"), ROWS, ids=lambda part: part.strip("/"))
def test_error_repeats_no_field_of_megabytes(server: RunningServer, path: str, name: str) -> None:
    """A refused value was in the answer as a whole: 4 MB for each of a client's requests."""
    base = ROUTES[path][0]
    for shape, value in SHAPES.items():
        body = base(name, value) if callable(base) else {**base, name: value}
        answer = call(server.url, path, body, seconds=60)
        if answer.status >= 400:
            assert len(answer.body) < MOST, (shape, answer.status, answer.body[:200])
            answer.json()  # it is whole


def test_log_repeats_no_field_of_megabytes(server: RunningServer) -> None:
    """After all of the requests above."""
    log = server.process.stderr
    assert "/v1/chat/completions" in log
    assert "v" * MOST not in log
