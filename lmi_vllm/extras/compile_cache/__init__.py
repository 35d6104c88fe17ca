"""Where compiled code is kept: folders of this user alone, and a cache between containers."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    around_start=Lazy("lmi_vllm.extras.compile_cache.start:kept_code"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.compile_cache.store import CompileCacheSettings

    c.settings(CompileCacheSettings)
