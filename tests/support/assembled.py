"""The server's own parts, as `lmi_vllm.assembly` builds them, in the forms that tests call."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmi_vllm.adapters.source import AdapterSources as RoomAdapterSources
from lmi_vllm.assembly import assembled
from lmi_vllm.clock import Clock
from lmi_vllm.config import load
from lmi_vllm.config.listen import listener_errors as errors_of_listeners
from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import FeatureSettings, Settings
from lmi_vllm.messages import EngineArguments
from lmi_vllm.server.context import ModelContext, new_service
from lmi_vllm.sources.base import FetchRequest

ASSEMBLED = assembled()
CONFIGURATION = ASSEMBLED.configuration
PARTS = ASSEMBLED.parts
SOURCES = CONFIGURATION.sources
OPTIONS = CONFIGURATION.options

read_text = SOURCES.read_text
store_of = SOURCES.store_of

translate = CONFIGURATION.translator.translate
translate_start = CONFIGURATION.translator.translate_start
translate_checkpoint = CONFIGURATION.translator.translate_checkpoint
explain = CONFIGURATION.explain

start_violations = CONFIGURATION.security.start_violations
adapter_violations = CONFIGURATION.security.adapter_violations

AdapterSources = partial(RoomAdapterSources, SOURCES)


def fetch_model(reference: str, **request: Any) -> Path:
    """Return the folder of a model that is fetched with these fields of its request."""
    return SOURCES.fetch_model(FetchRequest(reference, **request))


def load_settings(
    environ: Mapping[str, str],
    command_line: CommandLine = CommandLine(),  # noqa: B008 - frozen
    extra_properties: PropertiesFile | None = None,
    kinds: Sequence[type[FeatureSettings]] | None = None,
) -> Settings:
    """Return all configured settings; with `kinds` of these features alone."""
    table = OPTIONS if kinds is None else OptionTable(kinds)
    return load.load_settings(environ, command_line, extra_properties, table=table, sources=SOURCES)


def model_context(
    settings: Settings, environ: Mapping[str, str] | None = None, *, is_first: bool = True
) -> ModelContext:
    """Return a model of a server with these settings, without parts."""
    service, arguments = new_service(settings, Clock()), EngineArguments({}, {})
    return ModelContext(service, settings, arguments, environ or {}, SOURCES, is_first)


def listener_errors(settings: Settings, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the errors of the files that the listeners need."""
    return errors_of_listeners(settings, environ, CONFIGURATION.make_tls)
