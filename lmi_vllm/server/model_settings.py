"""The plan of a model's start, with the settings of the model itself if it is no local directory.

Of a prefix only serving.properties is fetched: it is small, and may exclude the rest. An archive
has to be fetched first.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict

from lmi_vllm.config.model_source import (
    find_in_store,
    prefix_of_model,
    properties_of_prefix,
)
from lmi_vllm.config.properties import read_properties
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.inference.start_progress import Phase, StartProgress
from lmi_vllm.server.context import ServerContext
from lmi_vllm.server.plan import StartPlan, plan_start
from lmi_vllm.sources.archives import is_archive, unpack
from lmi_vllm.sources.base import FetchRequest
from lmi_vllm.sources.model_store import PROPERTIES_NAME
from lmi_vllm.translate.configuration import Configuration

logger = logging.getLogger(__name__)


async def planned(
    context: ServerContext,
    settings: Settings,
    typed: CommandLine,
    environ: Mapping[str, str] | None = None,
) -> tuple[StartPlan | None, Settings]:
    """Return the plan, None without a model, and the settings with those of the model itself.

    `environ` has the variables that settings are read from, if they are not the server's.

    Raises:
        LmiError: the model is not there, or cannot be served.
    """
    configuration, start = context.configuration, context.service.lifecycle.start
    environ = context.environ if environ is None else environ
    settings = await _completed(settings, typed, environ, start, configuration)
    plan = await asyncio.to_thread(
        plan_start, configuration, context.start_parts, settings, context.environ, context.exports
    )
    return plan, settings


async def _completed(
    settings: Settings,
    typed: CommandLine,
    environ: Mapping[str, str],
    start: StartProgress,
    configuration: Configuration,
) -> Settings:
    """`settings` with those of the model's own serving.properties, which is fetched or unpacked.

    Raises:
        DownloadError: the model is not there, or its archive is damaged.
    """
    finding = find_in_store(settings, environ)
    if finding.archive is not None and finding.directory is None:
        start.enter(Phase.DOWNLOAD)
        logger.info("unpacking %s", finding.archive)
        await asyncio.to_thread(unpack, finding.archive, environ, str(finding.archive))
        settings = configuration.load(environ, typed)
    sources = configuration.sources
    named = prefix_of_model(settings, typed.model, environ, sources)
    if not named:
        return settings
    if not is_archive(named):
        properties = await asyncio.to_thread(properties_of_prefix, named, environ, sources)
    else:
        start.enter(Phase.DOWNLOAD)
        request = FetchRequest(
            named, environ, on_progress=lambda progress: start.report(asdict(progress))
        )
        folder = await asyncio.to_thread(sources.fetch_model, request)
        path = folder / PROPERTIES_NAME
        properties = read_properties(path) if path.is_file() else None
    return settings if properties is None else configuration.load(environ, typed, properties)
