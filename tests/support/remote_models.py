"""Models that are not here: where they are, and what is asked for before they are fetched."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from lmi_vllm.commands import explain
from lmi_vllm.server.plan import StartPlan, plan_start
from tests.support.assembled import CONFIGURATION, PARTS, load_settings
from tests.support.hub_server import Repository, hub_server
from tests.support.s3_server import BUCKET, s3_server

PICKLES = ("pytorch_model.bin", "tokenizer.json")

Place = Callable[[Mapping[str, object]], AbstractContextManager[tuple[dict[str, str], list[str]]]]


@contextmanager
def on_a_hub(config: Mapping[str, object]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Give the variables of a model on a hub, and the paths it is asked for."""
    files = dict.fromkeys(PICKLES, b"weights") | {"config.json": json.dumps(config).encode()}
    with hub_server(acme__tiny=Repository(files)) as hub:
        asked: list[str] = []
        yield {"HF_MODEL_ID": "acme/tiny", "HF_ENDPOINT": hub.url}, asked
        asked += [path.rpartition("/")[2] for path in hub.paths("GET")]


@contextmanager
def in_s3(config: Mapping[str, object]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Give the same of a prefix in S3."""
    with s3_server() as store:
        files = dict.fromkeys(PICKLES, b"weights") | {"config.json": json.dumps(config).encode()}
        store.put({f"tiny/{name}": body for name, body in files.items()})
        asked: list[str] = []
        yield {**store.environ, "HF_MODEL_ID": f"s3://{BUCKET}/tiny/"}, asked
        asked += [name.rpartition("/")[2] for name in store.objects_sent]


def planned(environ: Mapping[str, str]) -> StartPlan:
    """Return what `serve` would start; refused before anything is fetched."""
    plan = plan_start(CONFIGURATION, PARTS.start, load_settings(environ), environ, {})
    assert plan is not None
    return plan


def explained(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str], *flags: str
) -> Mapping[str, Any]:
    """Return what `explain` prints, on four GPUs."""
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser, CONFIGURATION)
    given = ["--format", "json", "--gpus", "4", "--model-store", "/nonexistent", *flags]
    explain.run(parser.parse_args(given), environ, CONFIGURATION)
    document: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return document
