"""Images in messages on a real vision model: both lanes, streams, limits and what is refused."""

import base64
import http.client
import json
import os
import random
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from integration.client import Answer, call
from integration.conftest import RunningServer, StartServer, running_server
from integration.package_copies import NoPackageError, torchvision_copy
from tests.support.adapter_files import CONFIG, WEIGHTS, write_safetensors

pytestmark = pytest.mark.vllm

TOKENS = 8
PROPERTIES = """option.dtype=fp32
option.enforce_eager=true
option.max_model_len=512
option.kv_cache_memory_bytes=67108864
option.limit_mm_per_prompt={"image": 2}
option.enable_lora=true
option.max_loras=1
option.max_cpu_loras=4
"""
ADAPTERS = ("first", "second")
# Of the text model in this one; the class has its modules under these names.
TEXT_MODULES = "base_model.model.model.language_model.layers.{}.self_attn.q_proj.lora_{}.weight"


@dataclass(frozen=True)
class VisionModel:
    """A checkpoint and the environment in which vLLM can load it."""

    folder: Path
    environ: dict[str, str]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    """The tiny vision model; skips where pip cannot get torchvision."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.vision_model import vision_model  # noqa: PLC0415 (imports torch)

    try:
        cache = torchvision_copy()
    except NoPackageError as error:
        pytest.skip(str(error))
    published = tmp_path_factory.mktemp("published")
    shutil.copytree(cache, published, dirs_exist_ok=True)
    # As PyPI has it, and as the server must cope with: its operators are not those of a CPU torch.
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    (published / "torchvision" / "_meta_registrations.py").write_text(broken, encoding="utf-8")
    folder = vision_model(tmp_path_factory.mktemp("vision") / "model")
    (folder / "serving.properties").write_text(PROPERTIES, encoding="utf-8")
    for seed, name in enumerate(ADAPTERS):
        text_adapter(folder / "adapters" / name, seed)
    paths = [str(published), os.environ.get("PYTHONPATH", "")]
    return VisionModel(folder, {"PYTHONPATH": os.pathsep.join(filter(None, paths))})


def text_adapter(folder: Path, seed: int, names: str = TEXT_MODULES) -> Path:
    """Write an adapter of the text model, whose modules have these names."""
    folder.mkdir(parents=True)
    rng, sides = random.Random(seed), {"A": (8, 128), "B": (128, 8)}
    shapes = {names.format(layer, side): sides[side] for layer in range(2) for side in sides}
    write_safetensors(folder / WEIGHTS, shapes, lambda: rng.gauss(0.0, 0.1))
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(vision: VisionModel) -> Iterator[RunningServer]:
    """The vision model behind a real process."""
    with running_server(
        vision.folder.parent, "--model", str(vision.folder), environ=vision.environ
    ) as server:
        yield server


@pytest.fixture
def picture_url() -> Iterator[str]:
    """An image on a loopback address."""
    image = _picture(1)

    class Pictures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(image)))
            self.end_headers()
            self.wfile.write(image)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}/picture.png"
        web.shutdown()


def _picture(seed: int) -> bytes:
    from tests.support.vision_model import picture  # noqa: PLC0415 (imports torch)

    return picture(seed)


def _data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def _payload(*urls: str, **more: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "see "}, *images]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    } | more


def _text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    text = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def _streamed(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    events = [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_the_answer_depends_on_the_image_and_is_the_same_everywhere(server: RunningServer) -> None:
    """One image, one answer, streamed or not, on /v1 and /invocations; another, another."""
    payload = _payload(_data_url(_picture(1)))
    first = _text(call(server.url, "/v1/chat/completions", payload))
    assert _text(call(server.url, "/v1/chat/completions", payload)) == first
    assert _text(call(server.url, "/invocations", payload)) == first
    streamed = call(server.url, "/v1/chat/completions", payload | {"stream": True})
    assert _streamed(streamed) == first
    other = _payload(_data_url(_picture(2)))
    assert _text(call(server.url, "/v1/chat/completions", other)) != first


@pytest.mark.parametrize("seed", [1, 2])
def test_the_tokens_are_those_of_transformers(
    server: RunningServer, vision: VisionModel, seed: int
) -> None:
    """Greedy tokens for an image equal the reference implementation's."""
    from tests.support.vision_model import greedy_tokens  # noqa: PLC0415 (imports torch)

    image = _picture(seed)
    payload = _payload(_data_url(image), return_token_ids=True)
    answer = call(server.url, "/v1/chat/completions", payload)
    assert answer.status == 200, answer.body
    expected = greedy_tokens(vision.folder, "see ", image, TOKENS)
    assert answer.json()["choices"][0]["token_ids"] == expected


def _asked_from(address: str, url: str, payload: dict[str, Any]) -> str:
    """Return the answer to a client with this address."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=60, source_address=(address, 0)
    )
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(payload), headers)
    response = connection.getresponse()
    answer = Answer(response.status, {}, response.read())
    connection.close()
    return _text(answer)


def test_name_of_a_picture_is_the_client_s_own(server: RunningServer) -> None:
    """Another client's picture of that name answers for none; the client's own does, unsent."""

    def named(url: str | None) -> dict[str, Any]:
        payload = _payload("x")
        part = payload["messages"][0]["content"][1]
        part.update(uuid="logo", image_url=None if url is None else {"url": url})
        return payload

    first, second = (_data_url(_picture(seed)) for seed in (1, 2))
    texts = [_asked_from("127.0.0.1", server.url, _payload(url)) for url in (first, second)]
    assert texts[0] != texts[1]
    assert _asked_from("127.0.0.2", server.url, named(first)) == texts[0]
    assert _asked_from("127.0.0.1", server.url, named(second)) == texts[1]
    assert _asked_from("127.0.0.2", server.url, named(None)) == texts[0]
    assert _asked_from("127.0.0.1", server.url, named(None)) == texts[1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_invalid_or_too_many_images_are_the_client_s_error(
    server: RunningServer, path: str
) -> None:
    """Broken bytes and a third image are refused with a reason, and the engine lives."""
    good = _data_url(_picture(1))
    before = _text(call(server.url, path, _payload(good)))
    broken = call(server.url, path, _payload(_data_url(b"no picture at all")))
    assert 400 <= broken.status < 500, (broken.status, broken.body)
    assert b"image" in broken.body.lower()
    cut = call(server.url, path, _payload(_data_url(_picture(1)[:200])))
    assert 400 <= cut.status < 500, (cut.status, cut.body)
    many = call(server.url, path, _payload(good, good, good))
    assert 400 <= many.status < 500, (many.status, many.body)
    assert b"2 image" in many.body
    assert _text(call(server.url, path, _payload(good))) == before


LARGE: Final = {"top_k": 2**70, "temperature": 1}  # not greedy: then vLLM drops `top_k`
OPEN: Final = {"structured_outputs": {"regex": "(" * 40}}


def test_adapter_of_the_text_model_answers(server: RunningServer, tmp_path: Path) -> None:
    """Trained without the tower, its modules have shorter names than in this model."""
    short = TEXT_MODULES.replace("model.language_model.", "model.")
    folder = text_adapter(tmp_path / "short", ADAPTERS.index("second"), short)
    query = f"/adapters?name=short&src={folder}"
    added = call(server.url, query, method="POST")
    assert added.status == 200, added.body
    chats, payload = "/v1/chat/completions", _payload(_data_url(_picture(1)))
    texts = [
        _text(call(server.url, chats, {**payload, "model": name}))
        for name in ("short", "second", "lmi")
    ]
    assert texts[0] == texts[1] != texts[2]


NEVER_SENT: Final[dict[str, tuple[str, int, dict[str, Any]]]] = {
    "a number that cannot be sent": ("/v1/chat/completions", 400, LARGE),
    "two answers": ("/v1/chat/completions", 400, {**LARGE, "n": 2}),
    "a grammar that is refused": ("/v1/chat/completions", 400, OPEN),
    "on LMI's route": ("/invocations", 424, OPEN),
    "counted": ("/v1/messages/count_tokens", 200, {}),
    "tokenized": ("/tokenize", 200, {}),
}


@pytest.mark.parametrize("name", NEVER_SENT)
def test_picture_of_a_request_that_was_never_sent_is_sent(server: RunningServer, name: str) -> None:
    """The next request with it was 500, because vLLM took the picture for the engine's."""
    url = _data_url(_picture(100 + list(NEVER_SENT).index(name)))
    path, status, fields = NEVER_SENT[name]
    payload = _payload(url, **fields)
    if path == "/v1/messages/count_tokens":
        payload = {"model": "lmi", **_bridged(url)[path]}
    refused = call(server.url, path, payload)
    assert refused.status == status, refused.body
    answers = [_text(call(server.url, "/v1/chat/completions", _payload(url))) for _ in range(3)]
    assert len(set(answers)) == 1


def test_picture_given_up_while_it_waits_for_an_adapter_is_sent(server: RunningServer) -> None:
    """One slot, two adapters, and a client that leaves; also while that one still waits."""
    first, second = ADAPTERS
    url, chats = _data_url(_picture(200)), "/v1/chat/completions"
    long = {"max_tokens": 450, "n": 16, "temperature": 1, "model": first}
    with ThreadPoolExecutor() as threads:
        running = threads.submit(call, server.url, chats, _payload(_data_url(_picture(1))) | long)
        while _running(server) < 1:
            assert not running.done(), running.result()
        with pytest.raises(TimeoutError):
            call(server.url, chats, _payload(url, model=second), seconds=0.3)
        waiting = threads.submit(call, server.url, chats, _payload(url, model=second))
        base = _text(call(server.url, chats, _payload(url)))
        assert not running.done(), running.result()
        assert _text(running.result())
        assert _text(waiting.result())
    assert _text(call(server.url, chats, _payload(url))) == base


def _running(server: RunningServer) -> float:
    series = call(server.url, "/metrics").body.decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in series
        if line.startswith("vllm:num_requests_running{")
    )


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/chat/completions", 400), ("/invocations", 424), ("/tokenize", 400)],
)
def test_a_template_without_a_place_for_the_image_is_named(
    server: RunningServer, path: str, status: int
) -> None:
    """Checkpoints lack their processor's files, or were given another template: no bare 500."""
    blind = _payload(_data_url(_picture(1)), chat_template_kwargs={"blind": True})
    answer = call(server.url, path, blind)
    assert answer.status == status, answer.body
    assert b"chat template has no place for this picture" in answer.body
    assert b"option.chat_template" in answer.body


def test_without_torchvision_the_start_says_so(
    vision: VisionModel, server_process: StartServer
) -> None:
    """The start names the package that is missing, and how it is installed."""
    hidden = vision.folder.parent / "hidden"
    hidden.mkdir()
    text = "import sys\nsys.modules['torchvision'] = None\n"
    (hidden / "sitecustomize.py").write_text(text, encoding="utf-8")
    paths = os.pathsep.join((str(hidden), os.environ.get("PYTHONPATH", "")))
    arguments = ("--model", str(vision.folder), "--port", "0")
    server = server_process(*arguments, environ={"PYTHONPATH": paths})
    assert server.wait_exit(120) != 0
    assert "torchvision" in (last := server.stderr.splitlines()[-1])
    assert "Models that take pictures need it" in last


def test_a_private_address_is_refused(server: RunningServer, picture_url: str) -> None:
    """The server is no way into its own network; the error names the switch."""
    for path in ("/v1/chat/completions", "/invocations"):
        refused = call(server.url, path, _payload(picture_url))
        assert 400 <= refused.status < 500, (refused.status, refused.body)
        assert b"LMI_MEDIA_ALLOW_PRIVATE=true" in refused.body


# Where machines of a cloud find their credentials, and a neighbour's address.
PRIVATE = ("http://169.254.169.254/latest/meta-data", "http://10.0.0.1/picture.png")


def _bridged(url: str) -> dict[str, dict[str, Any]]:
    """Return a request that shows a picture, of each shape that vLLM's own application reads."""
    shown: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": url}}
    said = _payload(url)
    return {
        "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": [shown]}]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [shown]}]},
        "/v1/responses": {
            "max_output_tokens": 1,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        },
        "/v1/chat/completions/batch": {**said, "messages": [said["messages"]]},
        "/tokenize": {"messages": said["messages"]},
    }


@pytest.mark.parametrize("path", _bridged(""))
def test_no_bridged_route_fetches_from_a_private_address(
    server: RunningServer, picture_url: str, path: str
) -> None:
    """The guard is below vLLM's connector, so that no shape of a request goes around it."""
    for url in (picture_url, *PRIVATE):
        body = {"model": "lmi", **_bridged(url)[path]}
        refused = call(server.url, path, body, seconds=30)
        assert 400 <= refused.status < 500, (refused.status, refused.body)
        assert b"LMI_MEDIA_ALLOW_PRIVATE=true" in refused.body


def test_a_private_address_is_fetched_where_allowed(
    vision: VisionModel, server_process: StartServer, picture_url: str
) -> None:
    """With the switch a URL answers as the same image inline does."""
    process = server_process(
        "--model",
        str(vision.folder),
        "--port",
        "0",
        environ=vision.environ | {"LMI_MEDIA_ALLOW_PRIVATE": "true"},
        is_forked=True,
    )
    url = process.url_when_ready()
    inline = _text(call(url, "/v1/chat/completions", _payload(_data_url(_picture(1)))))
    assert _text(call(url, "/v1/chat/completions", _payload(picture_url))) == inline


def _huge_head() -> bytes:
    """Return a PNG that says it has 2^40 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 1 << 20, 1 << 20, 8, 2, 0, 0, 0)
    end = struct.pack(">I", zlib.crc32(head)) + b"\0\0\0\x0bIDAT" + bytes(15)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + head + end


_PNG_HEAD = _huge_head()
UNREADABLE = {
    "a file": "file:///etc/hostname",
    "no base64": "data:,x",
    "no comma": "data:image/png;base64",
    "another scheme": "gopher://h/x",
    "a bad address": "http://[/x",
    "a zero": "file:///\0",
    "text": "data:image/png;base64," + base64.b64encode(b"text").decode(),
    "cut": "data:image/png;base64," + base64.b64encode(_PNG_HEAD[:40]).decode(),
    "a huge head": "data:image/png;base64," + base64.b64encode(_PNG_HEAD).decode(),
    "damaged base64": "data:image/png;base64,AAA",
    "nothing": "",
}


@pytest.mark.parametrize("url", UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_image_is_the_client_s_error(server: RunningServer, url: str) -> None:
    """In the form of the route: some were 500 or 501."""
    answers = [
        call(server.url, path, _payload(url)) for path in ("/v1/chat/completions", "/invocations")
    ]
    assert [answer.status in (400, 422, 424) for answer in answers] == [True, True], answers
    assert answers[0].json()["error"]["message"]
