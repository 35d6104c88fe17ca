"""Paths whose requests are logged below info, as the settings of the server and its model ask."""

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, ClassVar

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import option, ours
from lmi_vllm.config.settings import FeatureSettings, Settings

if TYPE_CHECKING:
    from lmi_vllm.inference.service import InferenceService
    from lmi_vllm.server.context import ModelContext


class RequestLogSettings(FeatureSettings):
    """Which requests have a line in the log, in vLLM's words."""

    section: ClassVar[str] = "Requests and replies"

    # fmt: off
    disable_access_log_for_endpoints: list[str] | None = option(parse.words, ours(),
        values="`/ping,/metrics`",
        note="Paths whose requests have no line in the log; with the level debug they have one. A "
        "path that no route has changes nothing, as in vLLM.")
    disable_uvicorn_access_log: bool = option(parse.boolean, ours(), default=False,
        note="No request has a line in the log; with the level debug each has one.")
    # fmt: on


@contextlib.asynccontextmanager
async def choosing_lines(
    service: "InferenceService", settings: Settings, *_: object
) -> AsyncIterator[None]:
    """Choose the lines of requests that come while the model is looked for."""
    _choose(service, settings)
    yield


@contextlib.asynccontextmanager
async def choosing_lines_of_model(model: "ModelContext") -> AsyncIterator[None]:
    """Choose the lines of requests as the model's settings ask."""
    _choose(model.service, model.settings)
    yield


def _choose(service: "InferenceService", settings: Settings) -> None:
    asked, log = settings.feature(RequestLogSettings), service.telemetry.request_log
    named = asked.disable_access_log_for_endpoints or ()
    log.quiet_paths = frozenset(f"/{path.strip('/')}" for path in named)
    log.is_quiet = asked.disable_uvicorn_access_log
