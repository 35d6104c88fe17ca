"""Encoder-decoder models for text, which vLLM does not run, on an engine over Transformers."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy, OwnEngine

EXTRA: Final = Extra(
    checkpoint_rules=(Lazy("lmi_vllm.extras.seq2seq.rules:choose_engine"),),
    engines=(
        OwnEngine(
            "Transformers engine",
            Lazy("lmi_vllm.extras.seq2seq.rules:runs_here"),
            Lazy("lmi_vllm.extras.seq2seq.factory:TransformersFactory"),
        ),
    ),
)
