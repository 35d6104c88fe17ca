"""Deferred answers: a request is answered with a token, and its result is read later."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.deferred.settings:DeferredSettings"),),
    lifespan=Lazy("lmi_vllm.extras.deferred.results:deferring"),
)
