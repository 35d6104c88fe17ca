"""A server without a model: POST /models loads one, DELETE frees its place."""

import tarfile
from pathlib import Path

import pytest

from lmi_vllm.errors import EngineMemoryError, EngineStartError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.start_progress import Phase
from tests.server.conftest import Engines, Serve, Serving, engines, serve, until

__all__ = ["engines", "serve"]

CODE = "model.py"
URL = "/models?url=some/model&model_name=one"


@pytest.fixture
async def empty(serve: Serve) -> Serving:
    """A server that waits for models."""
    server = await serve(model=None, SERVING_LOAD_MODELS="NONE")
    await until(lambda: "without a model: POST /models loads one" in server.printed())
    return server


async def test_a_server_without_a_model_is_healthy(empty: Serving) -> None:
    """And has nothing to infer with."""
    assert await empty.ping() == (200, None)
    assert await empty.infer() == 400


async def test_a_model_is_loaded_and_unloaded(empty: Serving, engines: Engines) -> None:
    """It serves under the name that was asked for; afterwards the place is free again."""
    answer = await empty.ask("POST", URL + "&job_queue_size=7")
    assert (answer.status, answer.json) == (200, {"status": 'Model "one" registered.'})
    assert await empty.infer() == 200
    (description,) = (await empty.ask("GET", "/models/one")).json[0]["models"]
    assert (description["queueSize"], description["loadedAtStartup"]) == (7, False)
    assert (await empty.ask("DELETE", "/models/one")).status == 200
    assert engines.started[0].is_closed
    assert await empty.ping() == (200, None)
    assert (await empty.ask("POST", URL)).status == 200
    assert await empty.infer() == 200


async def test_a_model_s_own_figures_are_shown(empty: Serving, tmp_path: Path) -> None:
    """Its serving.properties sizes the queue and says how many workers; a call may, too."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    own = "job_queue_size=300\nminWorkers=2\nmaxWorkers=3\n"
    (tmp_path / "serving.properties").write_text(own)
    for asked, shown in (("", (2, 3)), ("&min_worker=4", (4, 4))):
        answer = await empty.ask("POST", f"/models?url={tmp_path}&model_name=one{asked}")
        assert answer.status == 200, answer.json
        (description,) = (await empty.ask("GET", "/models/one")).json[0]["models"]
        (group,) = description["workerGroups"]
        assert description["queueSize"] == 300
        assert (group["minWorkers"], group["maxWorkers"]) == shown
        assert len(group["workers"]) == shown[0]
        assert (await empty.ask("DELETE", "/models/one")).status == 200


async def test_the_platform_s_worker_count_wins(serve: Serve, tmp_path: Path) -> None:
    """As for copies: SAGEMAKER_NUM_MODEL_WORKERS is above every other count."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "serving.properties").write_text("cpu.minWorkers=3\nminWorkers=4\n")
    server = await (await serve(str(tmp_path), SAGEMAKER_NUM_MODEL_WORKERS="2")).ready()
    [listed] = (await server.ask("GET", "/models")).json["models"]
    answer = await server.ask("GET", f"/models/{listed['modelName']}")
    (group,) = answer.json[0]["models"][0]["workerGroups"]
    assert (group["minWorkers"], group["maxWorkers"]) == (2, 2)


@pytest.mark.parametrize("form", ["file:{path}", "file://{path}", "file://localhost{path}"])
async def test_a_file_url_is_the_path(empty: Serving, tmp_path: Path, form: str) -> None:
    """One slash, three or a host of this machine; another machine is refused."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    answer = await empty.ask("POST", f"/models?url={form.format(path=folder)}/")
    assert (answer.status, answer.json) == (200, {"status": 'Model "mine" registered.'})
    assert (await empty.ask("DELETE", "/models/mine")).status == 200
    assert (await empty.ask("POST", f"/models?url=file://elsewhere{folder}")).status == 400


@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("model.py", ""),
        ("requirements.txt", ""),
        ("mine.py", "option.entryPoint=mine.py\n"),
        ("deep/modeling.py", "option.trust_remote_code=true\n"),
    ],
)
async def test_code_that_others_can_change_is_refused(
    empty: Serving, tmp_path: Path, name: str, properties: str
) -> None:
    """A client that may register a model names any folder; without code it is served from there."""
    folder = tmp_path / "shared"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "serving.properties").write_text(properties)
    (folder / name).touch()
    folder.chmod(0o777)
    answer = await empty.ask("POST", f"/models?url={folder}")
    assert answer.status == 400
    assert "the model brings code, and" in answer.json["message"]
    assert f"{folder} is world-writable" in answer.json["message"]
    (folder / name).unlink()
    (folder / "serving.properties").unlink()
    assert (await empty.ask("POST", f"/models?url={folder}")).status == 200


async def test_code_of_another_folder_that_others_can_change_is_refused(
    empty: Serving, tmp_path: Path
) -> None:
    """`option.model_id` names where the weights are, and the model's own classes beside them."""
    folder, weights = tmp_path / "mine", tmp_path / "shared"
    for one in (folder, weights):
        one.mkdir()
    (weights / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (weights / "modeling.py").touch()
    properties = f"option.model_id={weights}\noption.trust_remote_code=true\n"
    (folder / "serving.properties").write_text(properties)
    weights.chmod(0o777)
    answer = await empty.ask("POST", f"/models?url={folder}")
    assert (answer.status, f"{weights} is world-writable" in answer.json["message"]) == (400, True)
    weights.chmod(0o755)
    assert (await empty.ask("POST", f"/models?url={folder}")).status == 200


async def test_code_in_an_archive_that_others_can_change_is_refused(
    empty: Serving, tmp_path: Path
) -> None:
    """It is unpacked to a folder of this user's: the archive is what counts."""
    archive = tmp_path / "mine.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name, text in (("config.json", '{"architectures": ["LlamaForCausalLM"]}'), (CODE, "")):
            (tmp_path / name).write_text(text)
            packed.add(tmp_path / name, name)
    archive.chmod(0o666)
    answer = await empty.ask("POST", f"/models?url={archive}")
    assert (answer.status, f"{archive} is world-writable" in answer.json["message"]) == (400, True)
    archive.chmod(0o644)
    assert (await empty.ask("POST", f"/models?url={archive}")).status == 200


async def test_health_stays_while_a_model_loads(empty: Serving, engines: Engines) -> None:
    """Asked not to wait, the answer is 202; `/ping` is 200 with the state of the start."""
    engines.gate.clear()
    answer = await empty.ask("POST", URL + "&synchronous=false")
    assert answer.status == 202
    await empty.reached(Phase.ENGINE)
    status, entry = await empty.ping()
    assert (status, entry["status"]) == (200, "PENDING")
    assert await empty.infer() == 503
    engines.gate.set()
    await empty.became(State.HEALTHY)
    assert await empty.infer() == 200


async def test_there_is_one_place(empty: Serving) -> None:
    """Another model is refused, and the same one is there already."""
    await empty.ask("POST", URL)
    assert (await empty.ask("POST", URL)).status == 409
    other = await empty.ask("POST", "/models?url=another/model")
    assert other.status == 507
    assert "unregister one first" in other.json["message"]


FAILURES = {
    "memory": (EngineMemoryError, "it does not fit", 507),
    "other": (EngineStartError, "the tokenizer of out of memory is broken", 500),
}


@pytest.mark.parametrize(("kind", "text", "status"), FAILURES.values(), ids=FAILURES)
async def test_a_model_that_does_not_start_leaves_the_place_free(
    empty: Serving, engines: Engines, kind: type[EngineStartError], text: str, status: int
) -> None:
    """The caller is told why, by the error's type; the server goes on without a model."""
    engines.script = [kind(text)]
    refused = await empty.ask("POST", URL)
    assert refused.status == status
    assert text in refused.json["message"]
    assert await empty.ping() == (200, None)
    assert (await empty.ask("POST", URL)).status == 200


async def test_a_registered_model_that_dies_ends_the_server(
    empty: Serving, engines: Engines
) -> None:
    """As one that came with the start."""
    await empty.ask("POST", URL)
    engines.started[0].die()
    assert (await empty.ended())[0] == 1


async def test_models_are_not_loaded_while_draining(empty: Serving) -> None:
    """A stop ends a server without a model at once."""
    empty.stop.set()
    assert await empty.ended() == (0, "")
