"""`lmi-vllm fetch`: the command over loopback servers, its output and its exit code."""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_vllm.cli import main
from lmi_vllm.features.fetch.command import ProgressDisplay, add_arguments, run
from lmi_vllm.sources.base import DownloadProgress
from tests.support.assembled import CONFIGURATION
from tests.support.hub_server import COMMIT, HubServer, Repository, hub_server
from tests.support.s3_server import BUCKET, S3Server

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "pytorch_model.bin": b"b"}
HALF = DownloadProgress(1, 2, 50_000_000, 100_000_000, 10e6, 5.0)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """Return a hub with one model."""
    with hub_server(acme__tiny=Repository(dict(FILES))) as server:
        yield server


def fetch(environ: dict[str, str], *words: str) -> int:
    """Run the command line `fetch <words>`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, CONFIGURATION)
    return run(parser.parse_args(words), environ, CONFIGURATION)


def test_directory_is_all_of_stdout(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --to the cache's snapshot directory is printed, progress goes to stderr."""
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    assert fetch(environ, "acme/tiny", "--load-format", "npcache") == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/hub/models--acme--tiny/snapshots/{COMMIT}\n"
    assert "100% of 3 bytes, 2 of 2 files" in err


def test_to_places_plain_files_once(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--to holds files and no links, nothing stays beside it, an unchanged model is not moved."""
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    target = tmp_path / "out"
    assert fetch(environ, "acme/tiny", "--to", str(target)) == 0
    assert {p.name for p in target.iterdir()} == {
        ".lmi-fetch.json", "config.json", "model.safetensors",
    }  # fmt: skip
    assert not any(p.is_symlink() for p in target.iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]

    hub.requests.clear()
    assert fetch(environ, "acme/tiny", "--to", str(target)) == 0
    assert [path for path in hub.paths("GET") if "/lfs/" in path] == []
    hub.repositories["acme/tiny"].commit = "2" * 40
    hub.repositories["acme/tiny"].files["config.json"] = b"[]"
    assert fetch(environ, "acme/tiny", "--to", str(target)) == 0
    assert (target / "config.json").read_bytes() == b"[]"
    assert capsys.readouterr().out == f"{target}\n" * 3


def test_to_works_offline_from_the_cache(hub: HubServer, tmp_path: Path) -> None:
    """A filled cache serves --to without the hub."""
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    assert fetch(environ, "acme/tiny") == 0
    hub.requests.clear()
    offline = {**environ, "HF_HUB_OFFLINE": "1"}
    assert fetch(offline, "acme/tiny", "--to", str(tmp_path / "out")) == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.requests == []


def test_to_never_replaces_foreign_files(
    hub: HubServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A directory with files of a user's is refused with exit code 1 and the reason on one line."""
    (tmp_path / "mine.txt").touch()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with pytest.raises(SystemExit) as ended:
        main(["fetch", "acme/tiny", "--to", str(tmp_path)])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    (last,) = err.splitlines()
    assert last.startswith("lmi-vllm: error: ")
    assert "is not empty and was not made by lmi-vllm fetch" in last
    assert (tmp_path / "mine.txt").exists()


def test_s3_prefix_is_fetched_to_the_named_directory(empty_store: S3Server, tmp_path: Path) -> None:
    """--to works for S3 too, into an empty directory that exists."""
    (tmp_path / "out").mkdir()
    empty_store.put({"m/config.json": b"{}"})
    environ = {**empty_store.environ, "LMI_S3_CLIENT": "boto3"}
    assert fetch(environ, f"s3://{BUCKET}/m", "--to", str(tmp_path / "out")) == 0
    assert (tmp_path / "out/config.json").read_bytes() == b"{}"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def test_terminal_shows_a_bar() -> None:
    """On a terminal one line is drawn again and again."""
    stream = Terminal()
    display = ProgressDisplay(stream)
    display.show(HALF)
    display.close()
    text = "50% of 100.0 MB, 1 of 2 files, 10.0 MB/s, 5 s left"
    assert stream.getvalue() == f"\r\x1b[K[{'#' * 12}{'.' * 12}] {text}\n"


def test_log_gets_a_line_every_few_seconds() -> None:
    """Elsewhere the first report and then few lines, never a bar."""
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    for _ in range(3):
        display.show(HALF)
    assert stream.getvalue().count("\n") == 1
