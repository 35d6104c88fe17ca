"""SageMaker's library in vLLM's application imports a script of the model, past all that we check.

`build_app` calls its `bootstrap`, which imports `$SAGEMAKER_MODEL_PATH/$CUSTOM_SCRIPT_FILENAME`. By
default that is /opt/ml/model/model.py: LMI's own place for code, of which `LMI_CUSTOM_CODE`, secure
mode and the check of its owner decide here. What else it adds are `/ping`, `/invocations` and
adapters by path, which this server has itself.

Upstream: not reported that we know of; it is meant so.
Releases: 0.31 and later, with model-hosting-container-standards 0.1.
Shows: code of the model runs where it is forbidden, and an error in it ends the start.
May go: when tests/contract/test_bridge.py holds without it.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

HANDLERS: Final = "CUSTOM_FASTAPI_"  # variables that name handlers in that script


def left_out(_bootstrap: object) -> Callable[[Any], Any]:
    """Return what stands for `bootstrap`: the application stays as it is."""
    return _as_it_is


def _as_it_is(app: Any) -> Any:
    return app


def warn_of_handlers() -> None:
    """Warn of the variables that the library would have read."""
    for name in sorted(os.environ):
        if name.startswith(HANDLERS):
            logger.warning("%s has no effect: hooks are those of LMI's model.py", name)
