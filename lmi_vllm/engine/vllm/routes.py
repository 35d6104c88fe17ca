"""vLLM's request and response models by kind of call, and which handler answers each.

With `vllm_openai.py` the files we expect to touch at a vLLM upgrade.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.pooling.classify.protocol import (
    ClassificationRequest,
    ClassificationResponse,
)
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest, EmbeddingResponse
from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest, PoolingResponse
from vllm.entrypoints.pooling.scoring.protocol import (
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from vllm.entrypoints.serve.engine.protocol import ModelList
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

from lmi_vllm.messages import OpenAISchemas

SCHEMA_REFERENCE: Final = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class HandlerRoute:
    """Which model a kind's body is read into, which handler answers, and what it answers with.

    `interface` is vLLM's name for it in "The model does not support ...". `is_by_alias`
    is how vLLM's own route writes the answer.
    """

    request: Any
    response: Any
    attribute: str  # of vLLM's application state
    method: str
    interface: str
    is_by_alias: bool = False


ROUTES: Final[Mapping[str, HandlerRoute]] = MappingProxyType(
    {
        "chat/completions": HandlerRoute(
            ChatCompletionRequest,
            ChatCompletionResponse,
            "openai_serving_chat",
            "create_chat_completion",
            "Chat Completions API",
        ),
        "completions": HandlerRoute(
            CompletionRequest,
            CompletionResponse,
            "openai_serving_completion",
            "create_completion",
            "Completions API",
        ),
        "responses": HandlerRoute(
            ResponsesRequest,
            ResponsesResponse,
            "openai_serving_responses",
            "create_responses",
            "Responses API",
            is_by_alias=True,
        ),
        "tokenize": HandlerRoute(
            TokenizeRequest,
            TokenizeResponse,
            "serving_tokenization",
            "create_tokenize",
            "Tokenize API",
        ),
        "detokenize": HandlerRoute(
            DetokenizeRequest,
            DetokenizeResponse,
            "serving_tokenization",
            "create_detokenize",
            "Detokenize API",
        ),
        "embeddings": HandlerRoute(
            EmbeddingRequest, EmbeddingResponse, "serving_embedding", "__call__", "Embeddings API"
        ),
        "score": HandlerRoute(
            ScoreRequest, ScoreResponse, "serving_scores", "__call__", "Score API"
        ),
        "rerank": HandlerRoute(
            RerankRequest, RerankResponse, "serving_scores", "__call__", "Rerank (Score) API"
        ),
        "classify": HandlerRoute(
            ClassificationRequest,
            ClassificationResponse,
            "serving_classification",
            "__call__",
            "Classification API",
        ),
        "pooling": HandlerRoute(
            PoolingRequest, PoolingResponse, "serving_pooling", "__call__", "Pooling API"
        ),
    }
)
# Kinds about an earlier answer: the handler's method; their arguments are the call's body.
STORED_ROUTES: Final[Mapping[str, str]] = MappingProxyType(
    {"responses/retrieve": "retrieve_responses", "responses/cancel": "cancel_responses"}
)


def request_adapter(kind: str) -> "TypeAdapter[Any]":
    """Return what reads the body of a call of this kind; vLLM gives models and unions of them."""
    return TypeAdapter(ROUTES[kind].request)


@functools.cache
def openai_schemas() -> OpenAISchemas:
    """Return the JSON schemas of vLLM's request and response models, by kind."""
    wanted: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        *((kind, "validation", request_adapter(kind)) for kind in ROUTES),
        *((kind, "serialization", TypeAdapter(route.response)) for kind, route in ROUTES.items()),
        ("models", "serialization", TypeAdapter(ModelList)),
    ]
    found, shared = TypeAdapter.json_schemas(wanted, ref_template=SCHEMA_REFERENCE)
    return OpenAISchemas(
        requests={kind: schema for (kind, mode), schema in found.items() if mode == "validation"},
        answers={kind: schema for (kind, mode), schema in found.items() if mode != "validation"},
        definitions=shared.get("$defs", {}),
    )
