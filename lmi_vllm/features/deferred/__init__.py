"""Deferred answers: a request is answered with a token, and its result is read later."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.deferred.settings import DeferredSettings

    c.settings.append(DeferredSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.deferred.results import deferring

    s.lifespans.append(deferring)
