"""Models from S3 and the hub on the real engine, with every network but the loopback cut.

The test, the stores and the server share a network namespace without any route: whatever tried to
reach the internet would fail, and the engine works on when the store has gone too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.client import call, wait_until
from integration.conftest import StartServer
from integration.engine_restart import engine_of
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.hub_server import Repository, hub_server
from tests.support.no_network import without_network
from tests.support.s3_server import BUCKET, S3Server, s3_server, tar_gz

pytestmark = pytest.mark.vllm

PROMPT = {"inputs": "The capital of France is"}
ANSWER = " Paris. The city lies on the river Seine."
FAST = {
    "OPTION_DTYPE": "fp32",
    "OPTION_ENFORCE_EAGER": "true",
    "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
    "OPTION_MAX_MODEL_LEN": "512",
}
WEIGHTS_AND_TEXTS = (".json", ".safetensors", ".jinja")


def files_of_model() -> dict[str, bytes]:
    """The embedded model's own files, without adapters and options."""
    files = (path for path in DEMO_MODEL_DIR.iterdir() if path.suffix in WEIGHTS_AND_TEXTS)
    return {path.name: path.read_bytes() for path in files}


def model_directory() -> dict[str, bytes]:
    """The embedded model as an LMI model directory: options and adapters too."""
    paths = (path for path in DEMO_MODEL_DIR.rglob("*") if path.is_file())
    return {str(path.relative_to(DEMO_MODEL_DIR)): path.read_bytes() for path in paths}


@contextmanager
def store_with(**folders: dict[str, bytes]) -> Iterator[S3Server]:
    """Run an S3 store with these folders."""
    with s3_server() as store:
        for folder, files in folders.items():
            store.put({f"{folder}/{name}": body for name, body in files.items()})
        yield store


def answer(url: str, **extra: object) -> str:
    """Return what the model says."""
    reply = call(url, "/invocations", {**PROMPT, **extra})
    assert reply.status == 200, reply
    text: str = reply.json()["generated_text"]
    return text


def test_s3_prefix_is_served_with_its_options_and_adapters(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Options, weights and adapters come from the prefix; the next start fetches none of them."""

    def body() -> None:
        environ = {"HF_MODEL_ID": f"s3://{BUCKET}/tiny/", "SERVING_DOWNLOAD_DIR": str(tmp_path)}
        with store_with(tiny=model_directory()) as store:
            environ |= store.environ
            first = server_process("--port", "0", environ=environ, is_forked=True)
            url = first.url_when_ready()
            assert answer(url) == ANSWER
            assert answer(url, adapters="capitals") == ANSWER.upper()
            store.objects_sent.clear()
            # The model is fetched before any engine starts: this one has none to wait for.
            second = server_process("--port", "0", "--engine", "scripted", environ=environ)
            second.url_when_ready()
            read_ahead = ("serving.properties", "requirements.txt", "config.json")
            assert set(store.objects_sent) <= {f"tiny/{name}" for name in read_ahead}
        assert answer(url) == ANSWER  # the store has gone

    without_network(body)


@pytest.mark.parametrize("place", ["store", "s3"])
def test_archive_is_served_with_its_options_and_adapters(
    server_process: StartServer, tmp_path: Path, place: str
) -> None:
    """A model.tar.gz, local or in S3, is unpacked before its own serving.properties is read.

    Where it came from is nothing that the engine sees: one of the two is a scripted one.
    """
    packed = tar_gz({f"model/{name}": body for name, body in model_directory().items()})

    def body() -> None:
        environ = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}
        with s3_server() as store:
            if place == "store":
                (tmp_path / "store").mkdir()
                (tmp_path / "store" / "tiny.tar.gz").write_bytes(packed)
                environ |= {"SERVING_MODEL_STORE": str(tmp_path / "store")}
            else:
                store.put({"packed/tiny.tar.gz": packed})
                environ |= store.environ | {"HF_MODEL_ID": f"s3://{BUCKET}/packed/tiny.tar.gz"}
            engine = "vllm" if place == "s3" else "scripted"
            words = ("--port", "0", "--engine", engine)
            server = server_process(*words, environ=environ, is_forked=True)
            url = server.url_when_ready()
        plain, by_adapter = answer(url), answer(url, adapters="capitals")
        if engine == "vllm":
            assert (plain, by_adapter) == (ANSWER, ANSWER.upper())
        assert call(url, "/ping").json() == {"tiny": {"status": "Healthy"}}

    without_network(body)


def test_hub_model_outlives_its_hub(server_process: StartServer, tmp_path: Path) -> None:
    """Once fetched, neither the engine nor the one that replaces it asks the hub again."""

    def body() -> None:
        environ = FAST | {"HF_MODEL_ID": "acme/tiny", "HF_HOME": str(tmp_path)}
        environ |= {"SERVING_RETRY_THRESHOLD": "1"}
        with hub_server(acme__tiny=Repository(files_of_model())) as hub:
            server = server_process("--port", "0", environ={**environ, "HF_ENDPOINT": hub.url})
            url = server.url_when_ready()
        assert answer(url) == ANSWER
        engine_of(server).kill()
        assert wait_until(lambda: "the engine is back" in server.stderr, 60), server.describe()
        assert answer(url) == ANSWER

    without_network(body)


@pytest.mark.parametrize(("draft", "tokenizer"), [("s3", "hub"), ("hub", "s3")])
def test_draft_model_and_tokenizer_of_other_places_are_fetched(
    server_process: StartServer, tmp_path: Path, draft: str, tokenizer: str
) -> None:
    """Both come before the engine starts; the draft is really used, the other has no weights."""

    def body() -> None:
        weights = tmp_path / "weights"
        weights.mkdir()
        for name in ("config.json", "model.safetensors"):
            (weights / name).write_bytes((DEMO_MODEL_DIR / name).read_bytes())
        environ = FAST | {"HF_HOME": str(tmp_path / "hub"), "SERVING_DOWNLOAD_DIR": str(tmp_path)}
        repository = Repository(files_of_model())
        with (
            store_with(draft=files_of_model(), words=files_of_model()) as store,
            hub_server(acme__draft=repository, acme__words=repository) as hub,
        ):
            environ |= store.environ | {"HF_ENDPOINT": hub.url, "HF_MODEL_ID": str(weights)}
            environ |= draft_options(draft) | TOKENIZER_OPTIONS[tokenizer]
            server = server_process("--port", "0", environ=environ)
            url = server.url_when_ready()
            fetched = [*store.objects_sent, *hub.paths("GET")]
            of_draft = [path for path in fetched if "draft/" in path]
            of_words = [path for path in fetched if "words/" in path]
            assert any("model.safetensors" in path for path in of_draft), fetched
            assert any("tokenizer.json" in path for path in of_words), fetched
            assert not any("model.safetensors" in path for path in of_words), fetched
        assert answer(url) == ANSWER
        metrics = call(url, "/metrics").body.decode().splitlines()
        (drafts,) = [
            line for line in metrics if line.startswith("vllm:spec_decode_num_drafts_total")
        ]
        assert float(drafts.split()[-1]) > 0

    without_network(body)


def draft_options(kind: str) -> dict[str, str]:
    """The two ways to name a draft model."""
    options = {"OPTION_ENABLE_LORA": "false"}
    if kind == "s3":
        return options | {
            "OPTION_SPECULATIVE_DRAFT_MODEL": f"s3://{BUCKET}/draft/",
            "OPTION_SPECULATIVE_LENGTH": "2",
        }
    config = '{"model": "acme/draft", "revision": "main", "num_speculative_tokens": 2}'
    return options | {"OPTION_SPECULATIVE_CONFIG": config}


TOKENIZER_OPTIONS = {
    "s3": {"OPTION_TOKENIZER": f"s3://{BUCKET}/words/", "OPTION_TOKENIZER_REVISION": "main"},
    "hub": {"OPTION_TOKENIZER": "acme/words", "OPTION_TOKENIZER_REVISION": "main"},
}


def test_weights_are_streamed_from_s3(server_process: StartServer, tmp_path: Path) -> None:
    """With runai_streamer vLLM reads the weights itself, only small files reach the disk."""
    pytest.importorskip("runai_model_streamer", reason="needs runai-model-streamer[s3]")

    def body() -> None:
        environ = FAST | {"SERVING_DOWNLOAD_DIR": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
        with store_with(tiny=files_of_model()) as store:
            environ |= store.environ | {"HF_MODEL_ID": f"s3://{BUCKET}/tiny/"}
            environ |= {"OPTION_LOAD_FORMAT": "runai_streamer"}
            server = server_process("--port", "0", environ=environ)
            url = server.url_when_ready()
            assert not [path for path in tmp_path.rglob("*.safetensors") if path.is_file()]
            assert any(key.endswith("tiny/model.safetensors") for key in store.objects_sent)
        assert answer(url) == ANSWER

    without_network(body)
