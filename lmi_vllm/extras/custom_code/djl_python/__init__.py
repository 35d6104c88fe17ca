"""What a model.py written for LMI finds as `djl_python`: the names hooks use, nothing else.

`imports.provide_djl_python` puts this package under that name, once custom code is loaded. One
module here stands for several of LMI's; the table is there.
"""

from lmi_vllm.extras.custom_code.djl_python.content import Input, Output

__all__ = ["Input", "Output"]
