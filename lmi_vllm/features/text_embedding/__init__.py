"""Text embedding and reranking as on LMI's Rust and OnnxRuntime engines: options and requests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
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

    c.settings.append(TextEmbeddingSettings)
    c.rules[RulePhase.WRITTEN].append(put_pooling)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.text_embedding.requests import answering_texts

    s.model_parts.append(answering_texts)
