"""Encoder-decoder models for text, which vLLM does not run, on an engine over Transformers."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder

ENGINE: Final = "Transformers engine"


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.checks.model import OwnEngine
    from lmi_vllm.features.seq2seq.rules import choose_engine, runs_here
    from lmi_vllm.translate.draft import RulePhase

    c.engines.append(OwnEngine(ENGINE, runs_here))
    c.rules[RulePhase.CHECKPOINT].append(choose_engine)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.seq2seq.factory import TransformersFactory

    s.engines.own[ENGINE] = TransformersFactory
