"""Adapters over plain HTTP on the real engine: the hosting flow, every refusal, restarts.

Proves that the AWS hosting standard's calls work as its documentation shows them. 20 local adapters
answer correctly with two slots. No bad adapter is listed or ends the engine. Adapters registered
over the API are restored from the state file.
"""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from integration.adapters_support import SINGLE_THREAD
from integration.client import call
from integration.conftest import RunningServer, StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.adapter_files import (
    CAPITALS,
    WEIGHTS,
    copy_adapter,
    make_adapter,
    read_header,
    write_config,
    write_safetensors,
)

pytestmark = pytest.mark.vllm

PAYLOAD = {
    "inputs": "The capital of France is",
    "parameters": {"max_new_tokens": 12, "do_sample": False},
}
Change = Callable[[Path], object]


def started(start: StartServer, *arguments: str, **environ: str) -> RunningServer:
    """Return a ready server."""
    server = start(*arguments, "--port", "0", environ={**SINGLE_THREAD, **environ}, is_forked=True)
    return RunningServer(server, server.url_when_ready())


def ask(url: str, adapter: str | None = None) -> str:
    """Return the answer of one adapter, named by the hosting standard's header."""
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": adapter} if adapter else {}
    answer = call(url, "/invocations", PAYLOAD, headers=headers)
    assert answer.status == 200, answer.body
    return str(answer.json()["generated_text"])


def listed(url: str) -> list[str]:
    """Return the names of all registered adapters."""
    return [item["name"] for item in call(url, "/adapters").json()["adapters"]]


def register(url: str, name: str, src: object) -> tuple[int, str]:
    """Register an adapter as the hosting standard does; returns status and body."""
    path = f"/adapters?name={name}&src={src}"
    answer = call(url, path, method="POST")
    return answer.status, answer.body.decode()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as an inference component delivers it."""
    root = tmp_path_factory.mktemp("component")
    make_adapter(root / "french", 1)
    with tarfile.open(root / "french.tar.gz", "w:gz") as tar:
        tar.add(root / "french", arcname=".")
    return root / "french.tar.gz"


def _other_shapes(folder: Path) -> None:
    header = read_header(CAPITALS / WEIGHTS)
    shapes = {
        name: (entry["shape"][0], 64) if "lora_A" in name else (64, entry["shape"][1])
        for name, entry in header.items()
    }
    write_safetensors(folder / WEIGHTS, shapes)


def _other_modules(folder: Path) -> None:
    write_safetensors(
        folder / WEIGHTS,
        {
            "base_model.model.model.layers.0.mixer.in_proj.lora_A.weight": (8, 128),
            "base_model.model.model.layers.0.mixer.in_proj.lora_B.weight": (128, 8),
        },
    )


BAD: list[tuple[str, Change, str]] = [
    ("no-config", lambda at: (at / "adapter_config.json").unlink(), "adapter_config.json"),
    ("no-json", lambda at: (at / "adapter_config.json").write_text("{"), "not JSON"),
    ("no-weights", lambda at: (at / WEIGHTS).unlink(), "weights are missing"),
    ("corrupt", lambda at: (at / WEIGHTS).write_bytes(b"\xff" * 64), "damaged"),
    (
        "truncated",
        lambda at: (at / WEIGHTS).write_bytes((CAPITALS / WEIGHTS).read_bytes()[:-100]),
        "damaged",
    ),
    ("rank", lambda at: write_config(at, r=32), "rank 32 is greater than max_lora_rank 16"),
    ("dora", lambda at: write_config(at, use_dora=True), "use_dora"),
    ("modules", _other_modules, "the base model has no"),
    ("base", _other_shapes, "belongs to another base model"),
    ("gone", shutil.rmtree, "not a valid path"),
]


def test_hosting_flow_and_every_refusal(
    server_process: StartServer, tmp_path: Path, archive: Path
) -> None:
    """POST /adapters, header on /invocations, DELETE /adapters/{name}; bad ones change nothing."""
    url = started(server_process, "--demo").url
    base = ask(url)
    assert register(url, "french", archive) == (200, '{"status":"Adapter french registered"}\n')
    french = ask(url, "french")
    assert french != base
    for name, change, text in BAD:
        folder = copy_adapter(tmp_path / name)
        change(folder)
        status, body = register(url, name, folder)
        assert status == 424, name
        message = json.loads(body)["message"]
        assert text in message, name
        assert name in message
    assert listed(url) == ["capitals", "json", "french"]
    assert [ask(url), ask(url, "french")] == [base, french]
    cards = call(url, "/v1/models").json()["data"]
    assert [card["id"] for card in cards][-3:] == ["capitals", "json", "french"]
    assert call(url, "/adapters/french", method="DELETE").json() == {
        "status": "Adapter french unregistered"
    }
    gone = call(
        url, "/invocations", PAYLOAD, headers={"X-Amzn-SageMaker-Adapter-Identifier": "french"}
    )
    assert gone.status == 424
    assert "french" in gone.json()["error"]
    assert ask(url) == base


def test_twenty_local_adapters_share_two_slots(server_process: StartServer, tmp_path: Path) -> None:
    """More adapters than slots and than memory: each answers for itself, in random order."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, model, ignore=shutil.ignore_patterns("adapters"))
    names = [f"a{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        make_adapter(model / "adapters" / name, number)
    (model / "adapters" / ".hidden").mkdir()
    url = started(server_process, "--model", str(model), OPTION_MAX_CPU_LORAS="4").url
    assert sorted(listed(url)) == names
    expected: dict[str | None, str] = {name: ask(url, name) for name in (None, *names)}
    assert len(set(expected.values())) > 15
    rng = Random(3)
    for _ in range(3):
        for name in rng.sample([None, *names], 21):
            assert ask(url, name) == expected[name], name
    shuffled = rng.sample(names, 20)
    body: dict[str, Any] = {**PAYLOAD, "inputs": [PAYLOAD["inputs"]] * 20, "adapters": shuffled}
    answers = [item["generated_text"] for item in call(url, "/invocations", body).json()]
    assert answers == [expected[name] for name in shuffled]


def test_state_file_restores_adapters(server_process: StartServer, tmp_path: Path) -> None:
    """What was registered over the API is there after a restart; a broken entry is named."""
    state = str(tmp_path / "state" / "adapters.json")
    for name in ("one", "two"):
        make_adapter(tmp_path / name, len(name))
    first = started(server_process, "--demo", OPTION_ADAPTERS_STATE=state)
    for name in ("one", "two"):
        assert register(first.url, name, tmp_path / name)[0] == 200
    expected = ask(first.url, "one")
    first.process.kill()
    shutil.rmtree(tmp_path / "two")
    second = started(server_process, "--demo", OPTION_ADAPTERS_STATE=state)
    assert listed(second.url) == ["capitals", "json", "one"]
    assert ask(second.url, "one") == expected
    assert "adapter two could NOT be restored" in second.process.stderr
    kept = [entry["name"] for entry in json.loads(Path(state).read_text())["adapters"]]
    assert kept == ["one", "two"]


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file://localhost{}"])
def test_file_urls_name_an_adapter(demo_server: RunningServer, form: str) -> None:
    """One, three and no slashes before the path are one thing; another host is refused."""
    url = demo_server.url
    assert register(url, "by-url", form.format(CAPITALS))[0] == 200
    try:
        assert ask(url, "by-url") == ask(url, "capitals") != ask(url)
    finally:
        assert call(url, "/adapters/by-url", method="DELETE").status == 200
    status, text = register(url, "by-url", f"file://elsewhere{CAPITALS}")
    assert status == 424
    assert "elsewhere" in text
