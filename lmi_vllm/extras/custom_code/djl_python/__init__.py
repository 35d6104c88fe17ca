"""LMI's `djl_python` for a model.py: the names that hooks use, nothing else.

`imports.provide_djl_python` registers this package under that name when custom code is loaded.
One module here replaces several of LMI's; the table is there.
"""

from lmi_vllm.extras.custom_code.djl_python.content import Input, Output

__all__ = ["Input", "Output"]
