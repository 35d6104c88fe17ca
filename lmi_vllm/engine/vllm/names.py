"""Names of vLLM that several modules here use, or that a job is made of; its errors as ours.

No two modules import the same name, so that a release that moves one changes one of them.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import vllm.envs as vllm_settings
from vllm.connections import HTTPConnection
from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall, FunctionCall
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.utils import func_utils
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.structured_output import StructuredOutputManager

from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.errors import (
    AdapterCapacityError,
    EngineDeadError,
    EngineFailureError,
    LmiError,
    NoAdapterSlotError,
    OverloadError,
    PayloadError,
)
from lmi_vllm.messages import AdapterRef

__all__ = [
    "CHAT_OBJECTS",
    "MEDIA_CONNECTOR_REGISTRY",
    "BeamSearchParams",
    "DeltaMessage",
    "DeltaToolCall",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "FastIncrementalDetokenizer",
    "FinishReason",
    "FunctionCall",
    "GracefulHTTPError",
    "HTTPConnection",
    "LoRARequest",
    "LogprobsLists",
    "MediaConnector",
    "OutputProcessor",
    "OutputProcessorOutput",
    "ReasoningParserManager",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputManager",
    "StructuredOutputsParams",
    "VLLMValidationError",
    "VllmEngineDeadError",
    "cached_tokenizer_from_config",
    "create_error_response",
    "current_platform",
    "func_utils",
    "is_mistral_tokenizer",
    "our_errors",
    "parse_model_prompt",
    "to_lora_request",
    "vllm_settings",
]
# From 0.33 on handlers of chats have it: a stream of objects, which other routes read as they are.
CHAT_OBJECTS: Final = "chat_completion_stream_generator_raw"


def to_lora_request(adapter: AdapterRef | LoadedAdapter | None) -> LoRARequest | None:
    """Return vLLM's form of a load; None for the base model."""
    if adapter is None:
        return None
    return LoRARequest(adapter.name, adapter.engine_id, adapter.path)


@contextlib.contextmanager
def our_errors() -> Iterator[None]:
    """Turn vLLM's exceptions into ours, with their cause."""
    try:
        yield
    except VllmEngineDeadError as error:
        raise EngineDeadError from error
    except VLLMClientError as error:
        raise PayloadError(str(error)) from error
    except GracefulHTTPError as error:
        raise _told(error) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise PayloadError(str(error)) from error
    except (LmiError, asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:
        raise EngineFailureError(f"the engine failed: {error}") from error


def _told(error: GracefulHTTPError) -> LmiError:
    if isinstance(error.__cause__, AdapterCapacityError):
        return NoAdapterSlotError(str(error))
    if isinstance(error.__cause__, LmiError):
        return error.__cause__
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        return OverloadError("lmi")
    return EngineFailureError(str(error))
