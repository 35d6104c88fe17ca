"""SageMaker's library in vLLM's application imports a script of the model, past all that we check.

`build_app` calls its `bootstrap`, which imports `$SAGEMAKER_MODEL_PATH/$CUSTOM_SCRIPT_FILENAME`. By
default that is /opt/ml/model/model.py: LMI's own place for code, of which `LMI_CUSTOM_CODE`, secure
mode and the check of its owner decide here. So it is called later, by the feature custom_code
(`sagemaker_library`), where that code may run. What else it adds are adapters by path, which this
server has itself.

Upstream: not reported that we know of; it is meant so.
Releases: 0.31 and later, with model-hosting-container-standards 0.1.
Shows: code of the model runs where it is forbidden, and an error in it ends the start.
May go: when test_script_of_the_model_is_not_vllm_s_to_run holds without it.
"""

from collections.abc import Callable
from typing import Any


def left_out(_bootstrap: object) -> Callable[[Any], Any]:
    """Return what stands for `bootstrap`: the application stays as it is."""
    return lambda app: app
