"""The composition root: builds the parts of a server out of rooms and features.

Only this module and `cli.py` import features. A feature is a package in `extras/` with at most two
entry points, of which `configure` adds to how settings are read and what they mean. It imports
neither aiohttp nor vLLM, and what it adds when it is called.
"""

import functools
from collections.abc import Mapping
from typing import Final, Protocol

from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.extras import (
    adapter_store,
    adapters_state,
    compile_cache,
    deferred,
    error_rates,
    exporters,
    free_memory,
    front_ends,
    guide_defaults,
    hub,
    legacy_models,
    lmcache,
    nodes,
    object_stores,
    retired_options,
    root_path,
    secure_mode,
    seq2seq,
    sessions,
    speculation,
    text_embedding,
    tls,
    traces,
    watchdogs,
)
from lmi_vllm.translate.configuration import Configuration, ConfigurationBuilder


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
    secure_mode, free_memory, tls,
    # The meaning of settings: names of other servers come before what they may stand for.
    retired_options, speculation, lmcache, nodes, guide_defaults,
    # Engines, and models that vLLM lacks: an architecture is mapped before an engine is chosen.
    legacy_models, seq2seq, compile_cache, front_ends,
    adapter_store, adapters_state,
    deferred, sessions, text_embedding,
    root_path,
    error_rates, watchdogs, exporters, traces,
)  # fmt: skip


@functools.cache
def configuration() -> Configuration:
    """Return how settings are read and what they mean; it does not change."""
    builder = ConfigurationBuilder()
    for feature in CONFIGURES:
        feature.configure(builder)
    return builder.build()


def load_settings(
    environ: Mapping[str, str],
    command_line: CommandLine = CommandLine(),  # noqa: B008 - frozen, so one default is safe
    extra_properties: PropertiesFile | None = None,
) -> Settings:
    """Return all configured settings; see `lmi_vllm.config.load.load_settings`."""
    return configuration().load(environ, command_line, extra_properties)


def variables_to_serve(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that must be set before `serve` imports a library that reads them."""
    from lmi_vllm.extras.front_ends.settings import variables  # noqa: PLC0415 (only for `serve`)
    from lmi_vllm.extras.hub.location import fast_transfer  # noqa: PLC0415 (as above)

    return {**fast_transfer(environ), **variables(environ)}
