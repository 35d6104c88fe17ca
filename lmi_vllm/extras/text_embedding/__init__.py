"""Text embedding and reranking as on LMI's Rust and OnnxRuntime engines: options and requests."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.text_embedding.options:TextEmbeddingSettings"),),
    rules=(Lazy("lmi_vllm.extras.text_embedding.options:configure"),),
    lifespan=Lazy("lmi_vllm.extras.text_embedding.requests:answering_texts"),
)
