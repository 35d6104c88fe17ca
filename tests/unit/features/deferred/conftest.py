"""A server that answers later where it is asked to."""

from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.features.deferred.results import Deferrals, DeferredResults
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted


def keep(client: TestClient, results: DeferredResults) -> DeferredResults:
    """Let the server behind a client keep deferred answers there."""
    service = client.app[SERVICE]
    service.steps.deferrals[:] = [Deferrals(results, service.queue).defer]
    return results


@pytest.fixture
def serve(serve: ServeScripted) -> ServeScripted:
    """Return a client of a server that answers later where it is asked to."""

    async def start(*arguments: Any, **options: Any) -> TestClient:
        client = await serve(*arguments, **options)
        keep(client, DeferredResults())
        return client

    return start
