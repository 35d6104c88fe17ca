"""A prefix that a proxy leaves in front of paths: `option.root_path`."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.root_path.prefix:RootPathSettings"),),
    path_prefix=Lazy("lmi_vllm.extras.root_path.prefix:path_prefix"),
)
