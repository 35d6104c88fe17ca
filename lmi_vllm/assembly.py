"""The composition root: builds the parts of a server out of rooms and features.

Only this module and `cli.py` import features. A feature is a package in `features/` with at most
two entry points. `configure` adds to how settings are read and what they mean, and imports neither
aiohttp nor vLLM. `serve` adds to a server. Both import what they add when they are called.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from lmi_vllm.config.other_servers.as_settings import split_words, variables_of_flags
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.features import (
    adapter_store,
    adapters_state,
    api_docs,
    compile_cache,
    console,
    custom_code,
    deferred,
    error_rates,
    exporters,
    free_memory,
    front_ends,
    grammar_trials,
    guide_defaults,
    hub,
    kserve,
    legacy_models,
    lmcache,
    load_reports,
    lora_series,
    management,
    media_urls,
    nodes,
    object_stores,
    pickled_adapters,
    request_log,
    requirements,
    retired_options,
    root_path,
    scripted,
    secure_mode,
    seq2seq,
    sessions,
    speculation,
    start_steps,
    start_summary,
    text_embedding,
    tgi,
    tls,
    token_lane,
    traces,
    vllm_adapters,
    watchdogs,
    weights_ahead,
)
from lmi_vllm.translate.configuration import Configuration, ConfigurationBuilder

if TYPE_CHECKING:
    from aiohttp import web

    from lmi_vllm.engine.vllm.parts import ProcessParts
    from lmi_vllm.inference.service import InferenceService
    from lmi_vllm.server.parts import Assembled, ServerParts
    from lmi_vllm.web.request import WebOptions


class Configures(Protocol):
    """A feature that adds to the configuration."""

    def configure(self, c: ConfigurationBuilder) -> None:
        """Add to `c`."""


# Within a phase of the translation the rules of a feature run before those of the next one. The
# pages list its settings in this order, too.
CONFIGURES: Final[tuple[Configures, ...]] = (
    # Where models and adapters come from.
    hub, object_stores,
    # What may refuse a start.
    secure_mode, free_memory, tls, custom_code, requirements,
    # The meaning of settings: names of other servers come before what they may stand for.
    retired_options, speculation, lmcache, nodes, guide_defaults,
    # Engines, and models that vLLM lacks: an architecture is mapped before an engine is chosen.
    legacy_models, seq2seq, compile_cache, weights_ahead, front_ends,
    adapter_store, adapters_state,
    deferred, sessions, text_embedding,
    root_path,
    error_rates, watchdogs, exporters, request_log, traces,
)  # fmt: skip


class Serves(Protocol):
    """A feature that adds to a server."""

    def serve(self, s: "ServerParts") -> None:
        """Add to `s`."""


# What comes first is asked first: its routes, request steps and hooks are before those of others.
# Its lifespan begins first and ends last.
SERVES: Final[tuple[Serves, ...]] = (
    # Files of models, and what may refuse a start.
    requirements, custom_code, speculation, lmcache, free_memory,
    # Engines and processes.
    seq2seq, scripted, compile_cache, weights_ahead, front_ends, nodes,
    grammar_trials, media_urls, token_lane, pickled_adapters,
    # Adapters: a name is looked for in the store before it is shared with other replicas.
    adapter_store, adapters_state, vllm_adapters, lora_series,
    # Requests: one with a deferred answer has a session like any other; texts are embedded last.
    deferred, sessions, text_embedding,
    # Routes: those that `api_docs` describes are before it.
    root_path, management, kserve, tgi, api_docs, console,
    # What watches and reports; traces are sent off once sessions have been copied.
    error_rates, watchdogs, exporters, load_reports, request_log, start_steps, start_summary,
    traces,
)  # fmt: skip


@functools.cache
def configuration() -> Configuration:
    """Return how settings are read and what they mean; it does not change."""
    builder = ConfigurationBuilder()
    for feature in CONFIGURES:
        feature.configure(builder)
    return builder.build()


@functools.cache
def server_parts() -> "ServerParts":
    """Return what features add to a server; it does not change."""
    from lmi_vllm.server.parts import ServerParts

    parts = ServerParts()
    for feature in SERVES:
        feature.serve(parts)
    return parts


def process_parts() -> "ProcessParts":
    """Return what features do in the engine's own processes; called there."""
    from lmi_vllm.engine.vllm.parts import ProcessParts

    return ProcessParts(grammar_trials.watch_grammars, legacy_models.MODEL_CLASSES)


def assembled() -> "Assembled":
    """Return what a server is made of."""
    from lmi_vllm.server.parts import Assembled

    return Assembled(configuration(), server_parts())


def create_app(
    service: "InferenceService", options: "WebOptions | None" = None
) -> "web.Application":
    """Return the application over `service`, with the routes of features."""
    from lmi_vllm.web import app, request

    options = options or request.WebOptions()
    groups = (*server_parts().routes.groups, *options.groups)
    return app.create_app(service, dataclasses.replace(options, groups=groups))


def load_settings(
    environ: Mapping[str, str],
    command_line: CommandLine = CommandLine(),  # noqa: B008 - frozen, so one default is safe
    extra_properties: PropertiesFile | None = None,
) -> Settings:
    """Return all configured settings; see `lmi_vllm.config.load.load_settings`."""
    return configuration().load(environ, command_line, extra_properties)


def words_of_both(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """Return the words of the parser's flags, and the others, which are for vLLM's."""
    return split_words(words, parser._option_string_actions)


def variables_to_serve(environ: Mapping[str, str], words: Sequence[str]) -> Mapping[str, str]:
    """Return the variables that must be set before `serve` imports a library that reads them.

    `words` are those behind the verb: flags of vLLM's may stand for a variable of ours. Nothing is
    configured yet: features import prometheus_client, which reads its variable when it is imported.
    """
    from lmi_vllm.features.front_ends.settings import variables
    from lmi_vllm.features.hub.location import fast_transfer

    given = {**environ, **variables_of_flags(words)}
    return {**fast_transfer(given), **variables(given)}
