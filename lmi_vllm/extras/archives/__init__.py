"""Models and adapters in archives: `.tar.gz`, `.tgz`, `.zip` and LMI's `.mar`."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(archives=Lazy("lmi_vllm.extras.archives.extract:extract_archive"))
