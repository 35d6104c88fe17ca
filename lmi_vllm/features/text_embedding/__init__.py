"""Text embedding and reranking as on LMI's Rust and OnnxRuntime engines: options and requests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.text_embedding.options import (
        TextEmbeddingSettings,
    )
    from lmi_vllm.features.text_embedding.options import (
        configure as put_pooling,
    )
    from lmi_vllm.translate.draft import RulePhase

    c.settings(TextEmbeddingSettings)
    c.rule(RulePhase.WRITTEN, put_pooling)


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.text_embedding.requests import answering_texts

    s.model_part(answering_texts)
