"""Fixtures for all layers: a clean environment, and a scripted engine behind a real application."""

import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from pytest_aiohttp import AiohttpClient

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.assembly import create_app
from lmi_vllm.errors import DEFAULT_STATUSES, StatusTable
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.context import Runtime
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import ServingProfile
from lmi_vllm.server.code_start import SWITCHED_OFF, ModelCode
from lmi_vllm.web.request import WebOptions
from tests.support.scripted_application import DESCRIPTION, ScriptedApplication

OUR_PREFIXES = ("OPTION_", "SERVING_", "LMI_", "SAGEMAKER_", "HF_", "DJL_", "SM_", "AWS_", "OTEL_")
OUR_NAMES = (
    "TENSOR_PARALLEL_DEGREE",
    "PIPELINE_PARALLEL_DEGREE",
    "MAX_BATCH_SIZE",
    "MAX_CONCURRENT_REQUESTS",
    "MODEL_LOADING_TIMEOUT",
    "PREDICT_TIMEOUT",
)


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the shell that runs it has set."""
    for name in list(os.environ):
        if name.startswith(OUR_PREFIXES) or name in OUR_NAMES:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def same_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test runs in the folder that another one's `model.py` was loaded from."""
    monkeypatch.chdir(Path.cwd())


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """No test meets the log level that another one has set over HTTP."""
    loggers = [logging.getLogger(), logging.getLogger("vllm")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


async def packed_server(app: web.Application) -> TestServer:
    """Return a started server that leaves bodies packed, as `ClientConnection` does."""
    server = TestServer(app)
    await server.start_server(auto_decompress=False)
    return server


ServeScripted = Callable[..., Awaitable[TestClient]]


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that repeats the prompt; give it a script before the first request."""
    engine = ScriptedEngine(openapi=DESCRIPTION)
    engine.http = ScriptedApplication(engine)
    return engine


@pytest.fixture
def serve(aiohttp_client: AiohttpClient, engine: ScriptedEngine) -> ServeScripted:
    """Return a client of a ready application over the scripted engine."""

    async def start(
        profile: ServingProfile | None = None,
        *,
        limit: int = 1000,
        options: WebOptions | None = None,
        is_ready: bool = True,
        code: ModelCode = SWITCHED_OFF,
        statuses: StatusTable = DEFAULT_STATUSES,
    ) -> TestClient:
        profile = profile or ServingProfile(model_name="demo")
        lifecycle = Lifecycle(profile.model_name)
        service = InferenceService(RequestQueue(lifecycle, limit), profile, statuses=statuses)
        registry = AdapterRegistry(
            engine,
            str,
            is_enabled=profile.enable_lora,
            slots=profile.adapter_slots,
            load_code=code.load_adapter,
        )
        if is_ready:
            service.attach(Runtime(engine, profile, registry, code.hooks))
            lifecycle.set_state(State.HEALTHY)
        return await aiohttp_client(await packed_server(create_app(service, options)))

    return start
