"""Shared by these tests: `explain --format json` as a user runs it, ended requests."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from lmi_vllm.commands import explain
from lmi_vllm.telemetry.records import RequestSummary
from tests.support.assembled import CONFIGURATION

if TYPE_CHECKING:
    from tests.support.s3_server import S3Server

OTHER_USER = 12345


@dataclass(frozen=True)
class Explained:
    """One run of `explain --format json`."""

    exit_code: int
    document: Mapping[str, Any]

    @property
    def engine_args(self) -> Mapping[str, Any]:
        """The engine arguments."""
        return self.document["engine_args"]

    @property
    def server(self) -> Mapping[str, Any]:
        """The server settings."""
        return self.document["server"]

    @property
    def warnings(self) -> list[str]:
        """The warnings."""
        return self.document["warnings"]

    @property
    def errors(self) -> list[str]:
        """The errors."""
        return self.document["errors"]

    def option(self, name: str) -> Mapping[str, Any]:
        """The one row of option `name`."""
        rows = [row for row in self.document["options"] if row["name"] == name]
        assert len(rows) == 1, f"{name}: {rows}"
        return rows[0]


ExplainRun = Callable[..., Explained]
Ended = Callable[..., RequestSummary]


@pytest.fixture(autouse=True)
def lmcache_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on whether LMCache, which is large, is installed: it seems to be."""
    package = ModuleType("lmcache")
    package.__spec__ = ModuleSpec("lmcache", None)
    monkeypatch.setitem(sys.modules, "lmcache", package)


@pytest.fixture
def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> ExplainRun:
    """Run `explain --format json` over a store holding `properties`, with `environ`."""

    def run(properties: str = "", environ: str | Mapping[str, str] = "", *flags: str) -> Explained:
        store = tmp_path / "store"
        store.mkdir(exist_ok=True)
        if "engine=" in properties:  # which only a model directory has
            (store / "config.json").write_text("{}", encoding="utf-8")
        if properties:
            (store / "serving.properties").write_text(properties, encoding="utf-8")
        if isinstance(environ, str):
            environ = dict(pair.split("=", 1) for pair in environ.split())
        parser = argparse.ArgumentParser()
        explain.add_arguments(parser, CONFIGURATION)
        given = ["--format", "json", "--model-store", str(store), *flags]
        if "HF_ENDPOINT" not in environ and "AWS_ENDPOINT_URL" not in environ:
            given.append("--offline")  # a test that has a hub says where
        if "--gpus" not in flags:
            given += ["--gpus", "4"]
        exit_code = explain.run(parser.parse_args(given), environ, CONFIGURATION)
        document = json.loads(capsys.readouterr().out)
        # These tests are about options: most name no model, which is an error of its own.
        is_meant = "engine" in properties  # a file that names one means a model beside it
        errors = document["errors"]
        others = [text for text in errors if is_meant or "no model id is set" not in text]
        is_told = others != document["errors"]
        return Explained(0 if is_told and not others else exit_code, {**document, "errors": others})

    return run


@pytest.fixture
def ended() -> Ended:
    """Return how a request is made that has ended as told."""

    def make(status: int = 200, seconds: float = 1.0, **fields: object) -> RequestSummary:
        path = "/invocations"
        base = ("id", "POST", path, path, "127.0.0.1", status, "lmi", "", seconds)
        return RequestSummary(*base, **{"is_inference": True, **fields})  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def running_store() -> "Iterator[S3Server]":
    """One S3 store for all tests of a process; each test empties it first (`reset`)."""
    from tests.support.s3_server import s3_server  # noqa: PLC0415 (imports boto3)

    with s3_server() as server:
        yield server


@pytest.fixture
def empty_store(running_store: "S3Server") -> "S3Server":
    """The store, empty and without faults."""
    running_store.reset()
    return running_store


def of_other_user(folder: Path) -> Path:
    """Make a folder that another user owns."""
    folder.mkdir(parents=True)
    os.chown(folder, OTHER_USER, OTHER_USER)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that every user may write, as /tmp is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
