"""The time to first token of requests that had to wait for their adapter: which ones count."""

import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import UnknownAdapterError
from lmi_vllm.features.adapter_store.start import finding_adapters
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.telemetry.records import RequestRecord, SequenceFigures, enter_record
from tests.support.adapter_files import copy_adapter
from tests.support.assembled import AdapterSources, load_settings, model_context
from tests.support.s3_server import BUCKET, S3Server

NAME = "lmi_cold_adapter_time_to_first_token_seconds"


@dataclass
class Server:
    """A server that finds adapters in a folder."""

    service: InferenceService
    registry: AdapterRegistry
    count: int = field(default=0)

    async def ask(self, name: str, first_token_seconds: float | None) -> None:
        """Answer a request: its first token comes after so long, or never."""
        self.count += 1
        observers = self.service.telemetry.observers
        record = RequestRecord(f"r{self.count}", "POST", "/", "/", "", "lmi", observers)
        enter_record(record)
        try:
            async with self.registry.hold(name):
                if first_token_seconds is not None:
                    record.sequences.append(Work(record.arrived + first_token_seconds))
                record.end(200)
        except UnknownAdapterError:
            record.end(424)
        finally:
            enter_record(None)


@dataclass(frozen=True)
class Work:
    """What the engine has counted."""

    first_token_time: float

    def figures(self) -> SequenceFigures:
        """Return it."""
        return SequenceFigures(first_token_time=self.first_token_time)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """It, with two adapters."""
    for name in ("fr", "de"):
        copy_adapter(tmp_path / "store" / name)
    environ = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}
    settings = load_settings({"OPTION_ADAPTER_STORE": str(tmp_path / "store"), **environ})
    model, sources = model_context(settings, environ), AdapterSources(environ)
    await model.enter([finding_adapters])
    registry = AdapterRegistry(
        ScriptedEngine(),
        sources.resolve,
        is_enabled=True,
        hooks=lambda made: model.adapter_hooks(made, sources),
    )
    yield Server(model.service, registry)
    await model.leave()


def observed() -> tuple[float, float]:
    """Return how many requests have been observed, and the sum of their times."""
    ends = (REGISTRY.get_sample_value(f"{NAME}_{end}") or 0.0 for end in ("count", "sum"))
    count, total = ends
    return count, total


async def test_request_that_waited_for_its_adapter_is_observed(server: Server) -> None:
    """Once, with the time to its first token; not the next one, nor what had no token at all."""
    count, total = observed()
    await server.ask("fr", 0.75)
    assert observed() == (count + 1, pytest.approx(total + 0.75))
    await server.ask("fr", 0.5)
    await server.ask("nowhere", None)
    await server.ask("de", None)
    assert observed() == (count + 1, pytest.approx(total + 0.75))
    await server.ask("de", 0.5)
    assert observed() == (count + 1, pytest.approx(total + 0.75))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (f"s3://{BUCKET}/typo/", "there is nothing below this URL"),
        ("s3://no-such-bucket/adapters/", "no-such-bucket"),
        (f"s3://{BUCKET}/adapters/", ""),
    ],
)
async def test_place_in_a_store_without_adapters_is_warned_of(
    empty_store: S3Server, tmp_path: Path, place: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, once; a place that has objects is not."""
    empty_store.put({"adapters/fr/adapter_config.json": b"{}"})
    environ = {
        **empty_store.environ,
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
        "LMI_S3_CLIENT": "boto3",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    settings = load_settings({"OPTION_ADAPTER_STORE": place, **environ})
    model, sources = model_context(settings, environ), AdapterSources(environ)
    await model.enter([finding_adapters])
    before = set(threading.enumerate())
    AdapterRegistry(
        ScriptedEngine(),
        sources.resolve,
        is_enabled=True,
        hooks=lambda made: model.adapter_hooks(made, sources),
    )
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    await model.leave()
    warned = [one.getMessage() for one in caplog.records if "until that changes" in one.message]
    assert len(warned) == bool(said)
    assert not said or said in warned[0]
