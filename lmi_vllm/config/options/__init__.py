"""The option table: every section, and the aliases of other servers' variables.

row.py says how to write a row. Features add sections (`FeatureSettings`, settings.py); all of them
together are an `OptionTable` (option_table.py).
"""

from dataclasses import dataclass
from typing import Final

from lmi_vllm.config.options.engine import Batching, Parallel
from lmi_vllm.config.options.model import Lora, Model, Quantization
from lmi_vllm.config.options.requests import Chat, Code, Serving
from lmi_vllm.config.options.server import ServerKeys
from lmi_vllm.config.options.variables import Variables


class ModelOptions(Model, Parallel, Batching, Quantization, Lora, Serving, Chat, Code):
    """`option.<name>` in serving.properties or `OPTION_<NAME>`, in the order of the pages."""


class ServerOptions(ServerKeys, Variables):
    """Server keys and environment variables."""


OPTIONS: Final = ModelOptions.rows
SERVER_SETTINGS: Final = ServerKeys.rows
ENVIRONMENT_SETTINGS: Final = Variables.rows


@dataclass(frozen=True, slots=True)
class AliasVariable:
    """A variable that is copied to `target` when that is unset or empty."""

    source: str
    target: str
    note: str = ""


# LMI's entry script renames these before its server starts.
ALIAS_VARIABLES: Final[tuple[AliasVariable, ...]] = (
    AliasVariable("MAX_BATCH_SIZE", "OPTION_MAX_ROLLING_BATCH_SIZE"),
    AliasVariable("MAX_CONCURRENT_REQUESTS", "SERVING_JOB_QUEUE_SIZE"),
    AliasVariable("MAX_BATCH_PREFILL_TOKENS", "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS"),
    AliasVariable("HF_MODEL_TRUST_REMOTE_CODE", "OPTION_TRUST_REMOTE_CODE"),
    AliasVariable("HF_MODEL_QUANTIZE", "OPTION_QUANTIZE"),
    AliasVariable("SM_NUM_GPUS", "TENSOR_PARALLEL_DEGREE"),
    AliasVariable("CUDA_MEMORY_FRACTION", "OPTION_GPU_MEMORY_UTILIZATION"),
    AliasVariable("ENABLE_CUDA_GRAPHS", "OPTION_ENFORCE_EAGER", "inverted: true means false"),
)

# Variable -> option, read only while the option is unset.
LATE_VARIABLES: Final[tuple[tuple[str, str], ...]] = (
    ("TENSOR_PARALLEL_DEGREE", "tensor_parallel_degree"),
    ("PIPELINE_PARALLEL_DEGREE", "pipeline_parallel_degree"),
    ("MODEL_LOADING_TIMEOUT", "model_loading_timeout"),
    ("PREDICT_TIMEOUT", "predict_timeout"),
    ("DJL_ENTRY_POINT", "entryPoint"),
)

# The only variables that override serving.properties.
SAGEMAKER_VARIABLES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("SAGEMAKER_NUM_MODEL_WORKERS", ("minWorkers", "maxWorkers")),
    ("SAGEMAKER_STARTUP_TIMEOUT", ("option.model_loading_timeout",)),
    ("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", ("option.predict_timeout",)),
)

# These beat OPTION_*, and serving.properties beats them.
HUB_VARIABLES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("HF_MODEL_ID", ("option.model_id",)),
    ("HF_REVISION", ("option.revision",)),
    ("HF_TASK", ("option.task",)),
)
