"""Paths whose requests are logged below info, as the settings of the server and its model ask."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import option, ours
from lmi_vllm.config.settings import FeatureSettings, Settings
from lmi_vllm.messages import EngineArguments

if TYPE_CHECKING:
    from lmi_vllm.inference.service import InferenceService
    from lmi_vllm.server.context import ServerEvents


class RequestLogSettings(FeatureSettings):
    """Which requests have a line in the log, in vLLM's words."""

    section: ClassVar[str] = "Requests and replies"

    # fmt: off
    disable_access_log_for_endpoints: list[str] | None = option(parse.words, ours(),
        values="`/ping,/metrics`",
        note="Paths whose requests have no line in the log; with the level debug they have one.")
    disable_uvicorn_access_log: bool = option(parse.boolean, ours(), default=False,
        note="No request has a line in the log; with the level debug each has one.")
    # fmt: on


@contextlib.asynccontextmanager
async def choosing_lines(
    service: "InferenceService",
    settings: Settings,
    _: Mapping[str, str],
    events: "ServerEvents",
) -> AsyncIterator[None]:
    """Choose the lines of requests, also of those that come while the model is looked for."""
    log = service.telemetry.request_log

    def use_settings(settings: Settings, _: EngineArguments | None) -> None:
        asked = settings.feature(RequestLogSettings)
        log.quiet_paths = frozenset(asked.disable_access_log_for_endpoints or ())
        log.is_quiet = asked.disable_uvicorn_access_log

    use_settings(settings, None)
    events.on_plan.append(use_settings)
    yield
