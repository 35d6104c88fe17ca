"""LMI's `djl_python` for a model.py: the names that hooks use, nothing else.

`imports.provide_djl_python` registers this package under that name when custom code is loaded.
One module here replaces several of LMI's; the table is there.
"""

from typing import Final

from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.djl_python.outputs import Output
from lmi_vllm.features.custom_code.djl_python.pair_list import PairList
from lmi_vllm.features.custom_code.djl_python.session_files import Session, SessionManager

__all__ = ["Input", "Output", "PairList", "Session", "SessionManager"]

__version__: Final = "0.36.0"  # of LMI's package, whose names these are
