"""Hub models, fetched by the real huggingface_hub from a hub-like server on loopback."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.hub.api import LISTING_BYTES, TEXT_BYTES, read_hub_text
from lmi_vllm.features.hub.location import hub_repository
from lmi_vllm.sources.base import DownloadProgress
from tests.support.assembled import fetch_model
from tests.support.hub_server import COMMIT, SIGNATURE, HubServer, Repository, hub_server

WEIGHTS = bytes(range(256)) * 400
TINY = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"b" * 5000,
    "original/consolidated.00.pth": b"o" * 5000,
    "README.md": b"hello",
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """Return a hub with a public, a gated, a private and a weightless model."""
    with hub_server(
        acme__tiny=Repository(dict(TINY), revisions={"v1": COMMIT}),
        acme__gated=Repository(dict(TINY), token="hf_good", is_gated=True),
        acme__private=Repository(dict(TINY), token="hf_good"),
        acme__empty=Repository({"config.json": b"{}", "README.md": b""}),
    ) as server:
        yield server


@pytest.fixture
def environ(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """Return the variables that lead to the loopback hub and to an empty cache."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}


def names_in(directory: Path) -> set[str]:
    """Return the relative names of all files in `directory`."""
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def test_snapshot_has_only_files_that_vllm_reads(hub: HubServer, environ: dict[str, str]) -> None:
    """One weight format, no original/, no papers; and it lies in the hub's own cache layout."""
    snapshot = fetch_model("acme/tiny", environ=environ)

    assert names_in(snapshot) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    home = Path(environ["HF_HOME"])
    assert snapshot == home / "hub/models--acme--tiny/snapshots" / COMMIT


def test_second_fetch_moves_no_file(hub: HubServer, environ: dict[str, str]) -> None:
    """A cached model costs one or two look-ups and no transfer."""
    first = fetch_model("acme/tiny", environ=environ)
    hub.requests.clear()

    assert fetch_model("acme/tiny", environ=environ) == first
    assert hub.paths("GET") == ["/api/models/acme/tiny"]


def test_complete_cache_may_be_read_only(hub: HubServer, environ: dict[str, str]) -> None:
    """A cache that is complete is not written to: it may be a read-only mount."""
    snapshot = fetch_model("acme/tiny", environ=environ)
    lock = snapshot.parent.parent / ".lmi-fetch.lock"
    lock.unlink()
    fetch_model("acme/tiny", environ=environ)
    assert not lock.exists()


def test_revision_is_followed(hub: HubServer, environ: dict[str, str]) -> None:
    """A tag resolves to its commit."""
    assert fetch_model("acme/tiny", revision="v1", environ=environ).name == COMMIT


def test_download_dir_replaces_the_cache(environ: dict[str, str], hub: HubServer,
                                         tmp_path: Path) -> None:  # fmt: skip
    """`option.download_dir` is the hub cache when given, as in vLLM."""
    snapshot = fetch_model("acme/tiny", environ=environ, download_dir=tmp_path / "big")
    assert snapshot.is_relative_to(tmp_path / "big")


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_token_opens_gated_model(name: str, hub: HubServer, environ: dict[str, str]) -> None:
    """Both token variables work."""
    snapshot = fetch_model("acme/gated", environ={**environ, name: "hf_good"})
    assert (snapshot / "model.safetensors").exists()


def test_token_never_leaves_the_hub(hub: HubServer, environ: dict[str, str]) -> None:
    """The storage host behind the redirect does not get the token."""
    fetch_model("acme/gated", environ={**environ, "HF_TOKEN": "hf_good"})
    sent = {path: auth for (_, path), auth in zip(hub.requests, hub.authorizations, strict=True)}
    assert sent["/lfs/acme/gated/model.safetensors"] == ""
    assert sent["/api/models/acme/gated"] == "Bearer hf_good"


REFUSALS = [
    pytest.param("acme/gated", None, {}, ("gated", "HF_TOKEN", "acme/gated"), id="gated"),
    pytest.param(
        "acme/gated", None, {"HF_TOKEN": "hf_bad"}, ("gated", "no access"), id="gated-bad-token"
    ),
    pytest.param("acme/nothing", None, {}, ("not found", "check the name"), id="no-repository"),
    pytest.param("acme/private", None, {"HF_TOKEN": "hf_bad"}, ("may not read",), id="private"),
    pytest.param("acme/tiny", "v9", {}, ("v9", "option.revision"), id="no-revision"),
    pytest.param("acme/empty", None, {}, ("no weights", "load_format=auto"), id="no-weights"),
    pytest.param("a/b/c/d", None, {}, ("neither", "hub id"), id="not-an-id"),
    pytest.param("/no/such/dir", None, {}, ("does not exist",), id="no-directory"),
]


@pytest.mark.parametrize(("reference", "revision", "variables", "words"), REFUSALS)
def test_refusal_has_a_remedy(
    reference: str,
    revision: str | None,
    variables: dict[str, str],
    words: tuple[str, ...],
    environ: dict[str, str],
) -> None:
    """Each way to be refused has its own text, which names the source and never the token."""
    with pytest.raises(DownloadError) as caught:
        fetch_model(reference, revision=revision, environ={**environ, **variables})
    text = str(caught.value)
    assert reference in text
    assert all(word in text for word in words), text
    assert "hf_bad" not in text


def test_disk_full_names_both_numbers(hub: HubServer, environ: dict[str, str]) -> None:
    """The disk is checked before the first byte of a weight moves."""
    hub.repositories["acme/tiny"].announced_sizes["model.safetensors"] = 7 * 10**15
    with pytest.raises(DownloadError, match=r"needs 7\.0 PB .* only [\d.]+ [GTM]B are free"):
        fetch_model("acme/tiny", environ=environ)
    assert hub.paths("HEAD") == []


def test_offline_uses_the_cache_without_asking(hub: HubServer, environ: dict[str, str]) -> None:
    """HF_HUB_OFFLINE serves a filled cache and sends nothing."""
    online = fetch_model("acme/tiny", environ=environ)
    hub.requests.clear()

    assert fetch_model("acme/tiny", environ={**environ, "HF_HUB_OFFLINE": "1"}) == online
    assert hub.requests == []


def test_offline_without_cache_is_refused(environ: dict[str, str]) -> None:
    """Offline and not cached says so and names the cache."""
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE is set.*not in the cache"):
        fetch_model("acme/tiny", environ={**environ, "HF_HUB_OFFLINE": "1"})


def test_offline_incomplete_cache_is_refused(hub: HubServer, environ: dict[str, str]) -> None:
    """A snapshot that lacks weights is not handed to the engine."""
    snapshot = fetch_model("acme/tiny", environ=environ)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(DownloadError, match=r"incomplete, model\.safetensors"):
        fetch_model("acme/tiny", environ={**environ, "HF_HUB_OFFLINE": "1"})


def test_foreign_cache_is_checked_by_its_index(hub: HubServer, environ: dict[str, str]) -> None:
    """A cache filled by another tool, without a listing, must hold every shard of the index."""
    snapshot = Path(environ["HF_HOME"]) / "hub/models--acme--other/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").touch()
    offline = {**environ, "HF_HUB_OFFLINE": "1"}

    with pytest.raises(DownloadError, match=r"model-2\.safetensors"):
        fetch_model("acme/other", revision=COMMIT, environ=offline)
    (snapshot / "model-2.safetensors").touch()
    assert fetch_model("acme/other", revision=COMMIT, environ=offline) == snapshot


def test_unreachable_hub_falls_back_to_cache(
    hub: HubServer, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A hub that is away is a warning when the model is cached and an error when it is not."""
    online = fetch_model("acme/tiny", environ=environ)
    nowhere = {**environ, "HF_ENDPOINT": "http://127.0.0.1:9"}

    assert fetch_model("acme/tiny", environ=nowhere) == online
    assert "using the cached copy" in caplog.text
    with pytest.raises(DownloadError, match=r"cannot be fetched \(http://127\.0\.0\.1:9: "):
        fetch_model("acme/else", environ=nowhere)


@pytest.mark.parametrize("status", [200, 401, 403, 404, 429, 500, 503])  # 200: a login page
def test_hub_that_refuses_falls_back_to_a_complete_cache(
    hub: HubServer, environ: dict[str, str], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """An overloaded hub, or a token that has expired, does not keep a cached model from serving."""
    before = fetch_model("acme/tiny", environ=environ)
    hub.refusal = (status, {"Retry-After": "100"})
    began = time.monotonic()
    assert fetch_model("acme/tiny", environ=environ) == before
    repository = hub_repository("acme/tiny", None, environ, None)
    if status not in {200, 404}:  # an empty file, and none
        assert read_hub_text(repository, "config.json") == "{}"
    assert time.monotonic() - began < 30
    assert "using the cached copy of hub model acme/tiny" in caplog.text
    (before / "model.safetensors").unlink()
    hub.refusal = (status, {})
    with pytest.raises(DownloadError, match=f"{status}|not found|a login page"):
        fetch_model("acme/tiny", environ=environ)


def test_retry_after_is_waited_for(
    hub: HubServer, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a 429 without a cached copy: as long as it says, and no longer than minutes."""
    hub.refusal, hub.refusals_left = (429, {"Retry-After": "3"}), 1
    began = time.monotonic()
    assert names_in(fetch_model("acme/tiny", environ=environ)) >= {"model.safetensors"}
    assert time.monotonic() - began >= 3
    assert "status 429): trying again in 3 s" in caplog.text


def test_refused_connection_is_tried_again(
    hub: HubServer, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A container's network may come after the container."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    environ["HF_ENDPOINT"] = f"http://127.0.0.1:{port}"
    with pytest.raises(DownloadError, match="and is not in the cache"):
        fetch_model("acme/tiny", environ=environ)
    assert caplog.text.count("trying again") == 2


def test_cut_transfer_resumes(hub: HubServer, environ: dict[str, str]) -> None:
    """A transfer cut in the middle goes on where it stopped."""
    large = WEIGHTS * 250  # the library keeps what has arrived in pieces of 10 MiB
    hub.repositories["acme/tiny"].files["model.safetensors"] = large
    hub.cuts_left = 1
    snapshot = fetch_model("acme/tiny", environ=environ)
    assert (snapshot / "model.safetensors").read_bytes() == large
    assert hub.resumed_from == [10 << 20]


def test_broken_storage_fails_after_retries_and_leaves_no_weights(
    hub: HubServer, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Retries end with an error; finished files stay for the next run; no URL is shown signed."""
    hub.failures_left = 3
    caplog.set_level(logging.INFO)
    with pytest.raises(DownloadError, match=r"interrupted 3 times, last: .* status 500") as caught:
        fetch_model("acme/tiny", environ=environ)
    home = Path(environ["HF_HOME"])
    assert not list(home.rglob("*.safetensors"))
    assert not list(home.rglob("*.incomplete"))
    assert SIGNATURE not in caplog.text + str(caught.value)

    assert (fetch_model("acme/tiny", environ=environ) / "model.safetensors").exists()


def test_progress_counts_bytes_that_have_arrived(hub: HubServer, environ: dict[str, str]) -> None:
    """Half a file is seen as half its bytes, and the last report is complete."""
    hub.chunk_pause = threading.Event()
    seen: list[DownloadProgress] = []

    def watch(progress: DownloadProgress) -> None:
        seen.append(progress)
        if progress.files == progress.files_total - 1:
            assert hub.chunk_pause is not None
            hub.chunk_pause.set()

    fetch_model("acme/tiny", environ=environ, on_progress=watch)
    total = len(WEIGHTS) + 4
    assert (seen[-1].files, seen[-1].bytes, seen[-1].bytes_total) == (3, total, total)
    assert seen[0].bytes_total == total


def test_stale_partial_files_are_removed(hub: HubServer, environ: dict[str, str]) -> None:
    """What a killed run left behind does not fill the disk for ever; a fresh one is left alone."""
    blobs = Path(environ["HF_HOME"]) / "hub/models--acme--tiny/blobs"
    blobs.mkdir(parents=True)
    old, fresh = blobs / "aa.1.incomplete", blobs / "bb.2.incomplete"
    old.touch()
    fresh.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    fetch_model("acme/tiny", environ=environ)
    assert not old.exists()
    assert fresh.exists()


def test_local_path_is_returned_as_is(environ: dict[str, str], hub: HubServer,
                                      tmp_path: Path) -> None:  # fmt: skip
    """An existing directory needs no network."""
    assert fetch_model(str(tmp_path), environ=environ) == tmp_path
    assert hub.requests == []


def test_a_repository_of_endless_files_is_not_listed(
    hub: HubServer, environ: dict[str, str]
) -> None:
    """The list is read up to a bound, and so is a small file that is read as text."""
    files = {f"{number:01000000d}": b"" for number in range((LISTING_BYTES // 1_000_000) + 1)}
    hub.repositories["acme/tiny"].files |= files
    with pytest.raises(DownloadError, match=r"the list of files of hub model acme/tiny is not"):
        fetch_model("acme/tiny", environ=environ)
    hub.repositories["acme/private"] = Repository({"config.json": b" " * (TEXT_BYTES + 1)})
    source = hub_repository("acme/private", None, environ)
    with pytest.raises(DownloadError, match=r"config\.json of hub model acme/private is not read"):
        read_hub_text(source, "config.json")
