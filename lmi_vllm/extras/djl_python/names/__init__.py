"""What a model.py written for LMI finds as `djl_python`: the names hooks use, nothing else.

`shim` puts this package under that name, and only once custom code is loaded.
"""

from lmi_vllm.inference.hooks import inputs, outputs, pair_list
from lmi_vllm.inference.hooks.inputs import Input
from lmi_vllm.inference.hooks.outputs import Output

__all__ = ["Input", "Output", "inputs", "outputs", "pair_list"]
