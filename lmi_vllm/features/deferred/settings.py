"""The limits of deferred results; a module of its own so that `explain` imports little."""

from typing import ClassVar

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import ENV, option, ours
from lmi_vllm.config.settings import FeatureSettings


class DeferredSettings(FeatureSettings):
    """How much of deferred results is kept."""

    section: ClassVar[str] = "Server"

    # fmt: off
    memory_cache_capacity: int | None = option(parse.positive_int, ours(), written=(ENV,),
        values="entries", note="Deferred results that are kept; unset: 1000.")
    cache_batch: int = option(parse.positive_int, ours(), default=1, written=(ENV,),
        values="pieces", note="Pieces of a deferred result that become readable at once.")
    # fmt: on
