"""Encoder-decoder models for text, which vLLM does not run, on an engine over Transformers."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

ENGINE: Final = "Transformers engine"

EXTRA: Final = Extra(
    engines=MappingProxyType({ENGINE: Lazy("lmi_vllm.extras.seq2seq.factory:TransformersFactory")}),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.checks.model import OwnEngine
    from lmi_vllm.extras.seq2seq.rules import choose_engine, runs_here
    from lmi_vllm.translate.draft import RulePhase

    c.engine(OwnEngine(ENGINE, runs_here))
    c.rule(RulePhase.CHECKPOINT, choose_engine)
