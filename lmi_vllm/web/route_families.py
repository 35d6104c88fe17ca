"""Which dialect a path refuses in; the error middleware and the API description both ask here."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.errors import Dialect

# Routes that a platform must reach without a key.
OPEN_PATHS: Final = frozenset({"/ping", "/live", "/ready", "/health"})
# vLLM's routes -> the kind of call (engine/vllm/routes.py).
OPENAI_ROUTES: Final = MappingProxyType(
    {
        "/v1/chat/completions": "chat/completions",
        "/v1/completions": "completions",
        "/v1/responses": "responses",
        "/v1/embeddings": "embeddings",
        "/tokenize": "tokenize",
        "/detokenize": "detokenize",
        "/rerank": "rerank",
        "/v1/rerank": "rerank",
        "/v2/rerank": "rerank",
        "/score": "score",
        "/v1/score": "score",
        "/classify": "classify",
        "/pooling": "pooling",
        "/v1/models": "models",
    }
)
# TGI's own routes, with tgi_compat only.
TGI_PATHS: Final = frozenset({"/", "/generate", "/generate_stream", "/info"})


def dialect_of(path: str, *, is_tgi: bool) -> Dialect:
    """Return the dialect in which requests for `path` are refused."""
    if path.startswith("/v1/") or path in OPENAI_ROUTES:
        return Dialect.OPENAI
    if path.startswith(("/invocations", "/predictions")) or path.endswith("/invoke"):
        return Dialect.TGI if is_tgi else Dialect.LMI
    if is_tgi and path in TGI_PATHS:
        return Dialect.TGI
    return Dialect.SERVER
