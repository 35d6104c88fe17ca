"""Deferred answers of a server: how many are kept, and the requests that are about them."""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from lmi_vllm.config.settings import Settings
from lmi_vllm.extras.deferred.results import (
    DEFAULT_CAPACITY,
    STARTING_TOKEN,
    DeferredResults,
    is_deferred,
)
from lmi_vllm.extras.deferred.settings import DeferredSettings
from lmi_vllm.inference.admission import Admission
from lmi_vllm.inference.context import RequestStep
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import InferenceCall, Reply
from lmi_vllm.server.context import ServerEvents


@contextlib.asynccontextmanager
async def deferring(
    service: InferenceService, settings: Settings, _: Mapping[str, str], _events: ServerEvents
) -> AsyncIterator[None]:
    """Answer requests later that ask for it."""
    asked = settings.extra(DeferredSettings)
    results = DeferredResults(asked.memory_cache_capacity or DEFAULT_CAPACITY, asked.cache_batch)
    service.steps.append(DeferredStep(results, service.queue))
    yield


class DeferredStep(RequestStep):
    """Answers with a token, and with what has come of the request behind a token."""

    def __init__(self, results: DeferredResults, queue: Admission) -> None:
        self._results = results
        self._queue = queue

    async def before(
        self, call: InferenceCall, answer: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> Reply | None:
        """Return a token, or the pieces that a token stands for; None for all other requests.

        Raises:
            BadParameterError: the token is unknown.
            OverloadError: the queue is full: a refusal is answered now, not later.
        """
        if (token := call.properties.get(STARTING_TOKEN)) is not None:
            return self._results.read(token, call.properties)
        if not is_deferred(call.properties):
            return None
        self._queue.check_room()
        return self._results.start(answer())

    def binds(self, properties: Mapping[str, str]) -> bool:
        """Whether the request leaves a result here, or asks for one."""
        return STARTING_TOKEN in properties or is_deferred(properties)
