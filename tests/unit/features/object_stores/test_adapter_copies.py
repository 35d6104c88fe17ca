"""Of a prefix in S3 only the adapter's own files are fetched; they go with their last adapter."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.copies import FetchedCopies
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from tests.support.adapter_files import CAPITALS
from tests.support.assembled import AdapterSources
from tests.support.s3_server import BUCKET, S3Server, tar_gz

FILES = {file.name: file.read_bytes() for file in CAPITALS.iterdir() if file.is_file()}
STATES = {
    "optimizer.pt": bytes(3 << 20),
    "rng_state.pth": b"x",
    "training_args.bin": b"x",
    "checkpoint-10/adapter_config.json": b"{}",
    "checkpoint-10/adapter_model.safetensors": b"x",
    "checkpoint-10/optimizer.pt": b"x",
    "tokenizer.json": b"{}",
    "README.md": b"#",
}


@pytest.fixture
def environ(
    empty_store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Mapping[str, str]:
    """The environment of a server with a cache of its own."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    cache = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"), "LMI_S3_CLIENT": "boto3"}
    return {**empty_store.environ, **cache}


def put(store: S3Server, prefix: str, files: Mapping[str, bytes]) -> str:
    """Upload the files; return the URL of the prefix."""
    store.put({f"{prefix}{name}": body for name, body in files.items()})
    return f"s3://{BUCKET}/{prefix}"


def copies_in(environ: Mapping[str, str]) -> list[Path]:
    """Return the weights that lie in the cache."""
    return sorted(Path(environ["SERVING_DOWNLOAD_DIR"]).rglob("adapter_model.*"))


def test_only_the_adapter_is_fetched(empty_store: S3Server, environ: Mapping[str, str]) -> None:
    """States of the training stay where they are, and do not count as its size."""
    url = put(empty_store, "run/", {**FILES, **STATES, "chat_template.jinja": b"{{ x }}"})
    folder = Path(AdapterSources(environ).resolve(url))
    found = {file.name for file in folder.iterdir()} - {".lmi-fetch.json"}
    assert found == {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (STATES | {"checkpoint-20/adapter_config.json": b"{}"}, "below it: .*; name one of them"),
        ({"model.safetensors": b"x", "config.json": b"{}"}, "no adapter_config.json"),
        ({"adapter_config.json": b"{}", "optimizer.pt": b"x"}, "its weights are missing"),
        ({**FILES, "adapter_config.json": bytes(3 << 20)}, "too many"),
    ],
)
def test_what_is_no_adapter_is_refused_by_its_listing(
    empty_store: S3Server, environ: Mapping[str, str], files: Mapping[str, bytes], reason: str
) -> None:
    """Nothing is fetched before; the root of a bucket is such a case, too."""
    put(empty_store, "", files)
    with pytest.raises(AdapterRefusedError, match=reason):
        AdapterSources(environ).resolve(f"s3://{BUCKET}/")
    assert not empty_store.objects_sent


def test_only_adapter_in_a_folder_is_found(
    empty_store: S3Server, environ: Mapping[str, str]
) -> None:
    """A folder around it, with other files beside, is no reason to refuse it."""
    files = {f"final/{name}": body for name, body in FILES.items()}
    url = put(empty_store, "out/", {**files, "README.md": b"#"})
    assert (Path(AdapterSources(environ).resolve(url)) / "adapter_config.json").is_file()


def test_adapter_nearest_to_the_place_is_fetched(
    empty_store: S3Server, environ: Mapping[str, str]
) -> None:
    """A trainer's output has its checkpoints below it."""
    depths = ("out/", "out/checkpoint-10/", "out/checkpoint-20/")
    files = {depth + name: body for depth in depths for name, body in FILES.items()}
    url = put(empty_store, "run/", files)
    folder = Path(AdapterSources(environ).resolve(url))
    assert len(list(folder.parent.rglob("adapter_model.safetensors"))) == 1


async def test_copy_goes_with_its_last_adapter(
    empty_store: S3Server, environ: Mapping[str, str], tmp_path: Path
) -> None:
    """Not while another name uses it, nor when one is replaced from the same source."""
    url = put(empty_store, "fr/", FILES)
    other = put(empty_store, "de/", FILES)
    archive = tmp_path / "it.tar.gz"
    archive.write_bytes(tar_gz(FILES))
    sources = AdapterSources(environ, copies=FetchedCopies(environ))
    registry = AdapterRegistry(
        ScriptedEngine(), sources.resolve, is_enabled=True, release=sources.release
    )
    for name in ("a", "b"):
        await registry.register(Adapter(name, url))
    await registry.register(Adapter("packed", str(archive)))
    assert len(copies_in(environ)) == 2
    await registry.unregister("packed", 1)
    await registry.unregister("a", 1)
    await registry.replace(Adapter("b", url), 1, is_in_place=True)
    assert [str(path.parent) for path in copies_in(environ)] == [registry.describe("b").path]
    await registry.replace(Adapter("b", other), 1, is_in_place=True)
    assert [str(path.parent) for path in copies_in(environ)] == [registry.describe("b").path]
    await registry.unregister("b", 1)
    assert not copies_in(environ)
    await registry.register(Adapter("again", url))
    assert len(copies_in(environ)) == 1


async def test_refused_adapter_leaves_no_copy(
    empty_store: S3Server, environ: Mapping[str, str]
) -> None:
    """Whether a check refuses its files or the engine its weights."""
    sources = AdapterSources(environ, copies=FetchedCopies(environ))
    engine = ScriptedEngine(refused_adapters={"refused": "no"})
    registry = AdapterRegistry(engine, sources.resolve, is_enabled=True, release=sources.release)
    damaged = put(empty_store, "bad/", {**FILES, "adapter_model.safetensors": b"x" * 50})
    for adapter in (Adapter("bad", damaged), Adapter("refused", put(empty_store, "fr/", FILES))):
        with pytest.raises(AdapterRefusedError):
            await registry.register(adapter)
        assert not copies_in(environ)


def test_copy_that_another_server_uses_stays(
    empty_store: S3Server, environ: Mapping[str, str], tmp_path: Path
) -> None:
    """Two servers on a machine have one cache."""
    url = put(empty_store, "fr/", FILES)
    held = tmp_path / "held"
    other = (
        "import sys, time, pathlib; from lmi_vllm.adapters.copies import FetchedCopies\n"
        "FetchedCopies({'SERVING_DOWNLOAD_DIR': sys.argv[1]}).hold(sys.argv[2])\n"
        "pathlib.Path(sys.argv[3]).touch(); sys.stdin.read()"
    )
    arguments = (environ["SERVING_DOWNLOAD_DIR"], url, str(held))
    sources = AdapterSources(environ, copies=FetchedCopies(environ))
    with subprocess.Popen([sys.executable, "-c", other, *arguments], stdin=subprocess.PIPE) as one:
        while not held.exists():
            assert one.poll() is None
        sources.resolve(url)
        sources.release(url)
        assert len(copies_in(environ)) == 1
    sources.resolve(url)
    sources.release(url)
    assert not copies_in(environ)
