"""What a model.py written for LMI imports as `djl_python`: the names hooks use, nothing else.

`shim` puts this package under that name, and only once custom code is loaded.
"""

from lmi_vllm.inference.hooks.djl_python.inputs import Input
from lmi_vllm.inference.hooks.djl_python.outputs import Output

__all__ = ["Input", "Output"]
