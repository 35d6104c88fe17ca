"""Options of other backends, of older vLLM releases and of the Java server: what became of them."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(
        Lazy("lmi_vllm.extras.retired_options.options:ForeignOptions"),
        Lazy("lmi_vllm.extras.retired_options.options:DroppedArguments"),
        Lazy("lmi_vllm.extras.retired_options.options:JavaServerKeys"),
    ),
    rules=(
        Lazy("lmi_vllm.extras.retired_options.rules:legacy_arguments"),
        Lazy("lmi_vllm.extras.retired_options.rules:legacy_lengths"),
    ),
    fallback_rules=(Lazy("lmi_vllm.extras.retired_options.rules:put_fallbacks"),),
)
