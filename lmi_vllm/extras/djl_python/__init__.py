"""`djl_python`: the names that a model.py written for LMI imports, the ones that hooks use."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(before_custom_code=(Lazy("lmi_vllm.extras.djl_python.shim:provide"),))
