"""Settings that are variables as a whole (`LMI_API_KEY`), and the order of what can set one.

A flag of `vllm serve` counts before the variable, and a variable of another server's image after
it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.setting import CommandLine, OtherSettings, RawValue, Source
from lmi_vllm.config.variable_names import SERVING_PREFIX
from lmi_vllm.messages import Origin, OriginKind

_KEY: Final = "LMI_API_KEY"
_VLLM_KEY: Final = "VLLM_API_KEY"


def is_whole(key: str) -> bool:
    """Whether a key is the name of such a variable."""
    return key.isupper() and not key.startswith(SERVING_PREFIX)


def whole_variables(
    environ: Mapping[str, str], command_line: CommandLine, table: OptionTable, images: OtherSettings
) -> tuple[Source, ...]:
    """The texts of all of them, best first."""
    typed, of_images = _of(command_line.vllm.values), _of(images.values)
    own = tuple(_own(environ, table))
    key = next((raw for raw in (*typed, *own, *of_images) if raw.key == _KEY), None)
    if key is None or key in own:  # both open the server
        return typed, own, of_images
    # vLLM's `--api-key` came first, also as SM_VLLM_API_KEY: there VLLM_API_KEY opens nothing.
    others = tuple(raw for raw in own if raw.key != _VLLM_KEY)
    hidden = (RawValue(_KEY, raw.text, raw.origin) for raw in own if raw.key == _VLLM_KEY)
    return typed, others, of_images, tuple(hidden)


def _of(values: Iterable[RawValue]) -> Source:
    return tuple(raw for raw in values if is_whole(raw.key))


def _own(environ: Mapping[str, str], table: OptionTable) -> Iterator[RawValue]:
    for name in table.variables:
        if text := environ.get(name):
            yield RawValue(name, text, Origin(OriginKind.VARIABLE, name))
