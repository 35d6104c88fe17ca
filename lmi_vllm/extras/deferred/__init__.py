"""Deferred answers: a request is answered with a token, and its result is read later."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.deferred.results:deferring"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.deferred.settings import DeferredSettings

    c.settings(DeferredSettings)
